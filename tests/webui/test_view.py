"""The answer comes first: the visible part of a conversation on a desktop, a tablet and a phone."""

import httpx
import pytest
from page_kit import PHONE, TABLET, add, ask, begin, reload, until

DESK = {"viewport": {"width": 1280, "height": 900}}
SEEN = """() => {
    const inside = (e) => {
        const a = e.getBoundingClientRect(), b = document.querySelector('#scroller').getBoundingClientRect();
        return a.top >= b.top - 1 && a.bottom <= b.bottom + 1; };
    const turn = document.querySelector('.turn:last-child');
    const line = turn.querySelector('.turn-line');
    return inside(turn.querySelector('.answer .text')) && (!line || inside(line)); }"""


@pytest.mark.parametrize("device", [DESK, TABLET, PHONE], ids=["desk", "tablet", "phone"])
def test_the_newest_answer_is_seen_while_it_is_written_and_after(fake, open_page, device):
    add(fake, "RED")
    page = open_page(fake.url, **device)
    for n in range(4):
        ask(page, f"IMAGE#RED What is in image RED, in so many words that they fill a line or two? {n}")
        assert page.evaluate(SEEN)
    fake.engine.pause = 0.3
    begin(page, "And now slowly?")
    for _ in range(5):
        page.wait_for_timeout(60)
        assert page.evaluate(SEEN)
    fake.engine.pause = 0.0
    page.wait_for_selector(".turn:last-child .turn-line")
    page.click(".turn:last-child .facts")  # what opens below does not push the answer out of sight
    page.wait_for_selector(".strip")
    until(page, f"({SEEN})()")
    page.set_viewport_size({"width": device["viewport"]["width"], "height": 560})  # a keyboard opens
    until(page, f"({SEEN})()")
    page.reload()
    page.wait_for_selector(".turn:last-child .turn-line")
    # the choice is remembered, for the newest
    assert page.evaluate(SEEN) and page.locator(".strip").count() == 1


def test_who_scrolls_away_is_left_alone_and_can_come_back(fake, open_page):
    page = open_page(fake.url, viewport={"width": 1280, "height": 500})
    for n in range(4):
        ask(page, f"question {n}")
    fake.engine.pause = 0.15
    begin(page, "slowly")
    page.hover("#scroller")
    page.mouse.wheel(0, -2000)
    page.wait_for_selector("#to-newest:visible")
    fake.engine.pause = 0.0
    page.wait_for_selector(".turn:last-child .turn-line")
    assert page.evaluate("document.querySelector('#scroller').scrollTop") == 0
    page.click("#to-newest")
    assert page.evaluate(SEEN) and not page.locator("#to-newest").is_visible()


@pytest.mark.parametrize("device", [DESK, PHONE], ids=["desk", "phone"])
def test_twelve_short_answers_fit_two_screens(fake, open_page, device):
    fake.engine.answer, fake.engine.pause = "a blue star", 0.0
    page = open_page(fake.url, **device)
    for n in range(12):
        ask(page, f"What is top left, {n}?")
    height = page.evaluate("document.querySelector('#said').getBoundingClientRect().height")
    assert height <= 2 * device["viewport"]["height"]


def test_a_document_that_was_cut_is_shown_with_the_borders_of_its_chunks(fake, open_page):
    text = "# One\nFirst words.\n\n# Two\nOther words.\n"
    with httpx.Client(base_url=fake.url.removesuffix("/ui/").removesuffix("/ui")) as http:
        form = {"purpose": "user_data", "handle": "CUT", "split": '{"mode": "section", "tokens": 8}'}
        made = http.post("/v1/files", data=form, files={"file": ("cut.md", text.encode())})
        assert made.status_code == 200, made.text
        page = open_page(fake.url, expected=("404",))
        page.click("[aria-label='Open FILE#CUT']")
        page.wait_for_selector("dialog .chunk")
        chunks = http.get(f"/v1/files/{made.json()['id']}").json()["chunks"]
    assert len(chunks) > 1
    assert page.locator("dialog .chunk").count() == len(chunks)
    assert page.locator("dialog .chunk pre").all_inner_texts() == [
        text[c["start"] : c["end"]] for c in chunks
    ]


def test_an_image_and_a_document_open_from_chip_strip_and_library(fake, open_page):
    add(fake, "RED")
    fake.library.files.add("local", b"First line.\nSecond line.", "notes.txt", handle="NOTES")
    page = open_page(fake.url, expected=("404",))
    ask(page, "IMAGE#RED and FILE#NOTES?")
    page.click(".facts")
    for place in ("button.chip:has-text('RED')", "[aria-label='Open IMAGE#RED']", ".block.image .block-head"):
        page.click(place)
        page.wait_for_selector("dialog img.large + .hint")  # its size, once it is there
        assert "RED.png" in page.inner_text("dialog")
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")
    page.click(".block.document .block-head")
    page.wait_for_selector("dialog .chunk")
    assert "Chunk 1 of 1" in page.inner_text("dialog .chunk h3")
    assert page.inner_text("dialog .chunk pre") == "First line.\nSecond line."
    page.click("dialog button:text-is('Rename')")
    page.fill("dialog input", "no spaces")
    page.keyboard.press("Enter")
    assert "letters, digits" in page.inner_text("dialog .field-error")
    page.fill("dialog input", "red")
    page.keyboard.press("Enter")
    assert "already have" in page.inner_text("dialog .field-error")
    page.fill("dialog input", "MEMO")
    page.keyboard.press("Enter")
    page.wait_for_selector(".file[data-handle=MEMO]")
    assert fake.library.files.by_handle("local", "memo").filename == "notes.txt"
    fake.library.files.delete("local", fake.library.files.by_handle("local", "RED").id)
    page.click("button.chip:has-text('RED')")
    page.wait_for_selector("dialog:has-text('It was deleted')")


def test_settings_are_kept_and_sent(fake, open_page):
    page = open_page(fake.url)
    page.click("#settings-open")
    page.fill("#set-system", "Be brief.")
    page.fill("#set-temperature", "0.5")
    page.fill("#set-length", "3")
    page.select_option("#set-press", "snapkv-50")
    page.select_option("#set-theme", "dark")
    page.keyboard.press("Escape")
    page.click(".picker >> nth=0")
    page.keyboard.type("mpic-24")
    page.wait_for_selector("[role=option]:has-text('first 24 tokens')")
    page.keyboard.press("Enter")
    reload(page)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "hello")
    sent = asked.value.post_data_json
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (sent["temperature"], sent["max_tokens"], sent["mpic"]["policy"]) == (0.5, 3, "mpic-24")
    assert sent["mpic"]["press"] == "snapkv-50"
    assert page.inner_text(".answer .text").strip() == "The tower is"
    page.click(".picker >> nth=0")
    page.keyboard.type("mpic-zzz")
    page.wait_for_selector(".picker-status:has-text('unknown policy')")  # while it is typed
    assert page.get_attribute(".picker-panel input >> nth=0", "aria-invalid") == "true"
    page.keyboard.press("Enter")
    assert "mpic-24" in page.inner_text(".picker >> nth=0")


def test_an_answer_is_copied_as_it_was_written(fake, open_page):
    page = open_page(fake.url, permissions=["clipboard-read", "clipboard-write"])
    fake.engine.answer = "a **blue** star"
    ask(page, "what?")
    assert page.inner_text(".text strong") == "blue"
    page.click("[data-key=copy]")
    assert page.evaluate("navigator.clipboard.readText()") == "a **blue** star"
