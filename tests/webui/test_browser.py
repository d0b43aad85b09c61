"""The page in Chromium: a desktop, a phone, the keyboard, several tabs, and a server that goes and comes back."""

import pytest
from axe import SOURCE, Audit
from page_kit import (
    ANSWERED,
    AWAY,
    BOX,
    PHONE,
    add,
    answered,
    ask,
    begin,
    focused,
    kept,
    log_in,
    open_tab,
    questions,
    send,
    tab_to,
    until,
    upload,
)
from server_helpers import png
from small_models import SMALL_SAMPLES

from mpic.keys import KeyLimits

ANSWER = "The tower is taller than the museum – by far."
LONG = 25
"""Repetitions of an answer that is stopped. With half a second for a word, or more, it takes longer than a slow browser
needs to press a button; it has fewer words than the page asks for."""


def test_files_that_are_dropped_get_handles_and_are_asked_about(fake, open_page, tmp_path):
    page = open_page(fake.url)
    (tmp_path / "red cat.png").write_bytes(png())
    upload(page, SMALL_SAMPLES / "vera.txt", tmp_path / "red cat.png")
    until(page, lambda: page.input_value(BOX).split() == ["FILE#VERA", "IMAGE#RED_CAT"])
    page.wait_for_selector("#library [data-handle='IMAGE#RED_CAT'][data-state=ready] img")
    until(page, "document.querySelector('#library img').naturalWidth > 0")
    ask(page, "IMAGE#RED_CAT FILE#VERA What is it?")
    until(page, lambda: questions(page) == ["IMAGE#RED_CAT FILE#VERA What is it?"])
    until(page, lambda: ANSWER in page.inner_text("#bot"))
    page.click(f"{ANSWERED} summary")
    until(page, lambda: "36 reused" in page.inner_text(".mpic-blocks"))
    strip = page.locator(".mpic-strip span")
    assert {c for c in (one.get_attribute("class") for one in strip.all())} == {"s-device", "s-new"}
    assert page.locator(".mpic-blocks img").count() == 1


def test_a_file_that_is_dropped_beside_the_box_is_added_too(fake, open_page):
    page = open_page(fake.url)
    page.evaluate(
        """() => { const files = new DataTransfer();
        files.items.add(new File(['Vera lives in Rome.'], 'rome.txt', { type: 'text/plain' }));
        const drop = { dataTransfer: files, bubbles: true, cancelable: true };
        document.querySelector('h1').dispatchEvent(new DragEvent('drop', drop)); }"""
    )
    until(page, lambda: page.input_value(BOX).strip() == "FILE#ROME")


def test_comparing_answers_again_without_reuse_and_marks_what_differs(fake, open_page):
    add(fake, "RED")
    page = open_page(fake.url)
    ask(page, "IMAGE#RED What is it?")
    fake.engine.answer = "The tower is smaller than the museum – by far."
    page.click("[data-do=compare]")
    page.wait_for_selector(".mpic-verdict")
    until(page, lambda: page.locator("mark").all_inner_texts() == ["taller", "smaller"])
    assert page.locator(".mpic-head code").all_inner_texts() == ["mpic-16", "full"]
    assert "The answers differ" in page.inner_text(".mpic-verdict")
    assert page.locator(".mpic-strip").count() == 2


def test_an_answer_is_stopped_and_what_was_written_is_kept(fake, open_page):
    fake.engine.pause, fake.engine.answer = 1.5, " ".join([ANSWER] * LONG)
    page = open_page(fake.url)
    begin(page, "Tell me")
    page.click("#stop")
    page.wait_for_selector(".mpic-hint:text-is('Stopped.')")
    until(page, lambda: not fake.engine.held)
    until(page, lambda: not page.locator("#stop").is_visible())
    until(page, lambda: kept(page) and kept(page)[0][1].startswith("The tower"))
    assert fake.engine.answer not in kept(page)[0][1]


def test_a_tab_that_is_closed_ends_the_servers_work(fake, open_page):
    fake.engine.pause = 0.5
    page = open_page(fake.url)
    begin(page, "Tell me")
    page.close()
    other = open_page(fake.url)
    until(other, lambda: not fake.engine.held)


def test_questions_are_answered_again_edited_and_taken_back(fake, open_page):
    page = open_page(fake.url)
    ask(page, "One")
    fake.engine.answer = "Another answer."
    page.click("[aria-label=Retry]")
    until(page, lambda: "Another answer." in page.inner_text("#bot") and answered(page, 1))
    ask(page, "Two")
    fake.engine.answer = "A third answer."
    page.locator("[aria-label=Edit]").first.click()
    page.locator("#bot textarea").fill("First")
    page.locator("[aria-label=Submit]").first.click()
    # the box shows the new words, beside the old answers, before the server has been asked
    until(page, lambda: "A third answer." in page.inner_text("#bot") and answered(page, 2))
    until(page, lambda: questions(page) == ["First", "Two"])
    page.click("[aria-label=Undo]")
    until(page, lambda: questions(page) == ["First"] and page.input_value(BOX) == "Two")
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.accept()))
    page.click("[data-do=delete]")
    until(page, lambda: questions(page) == [] and kept(page) == [])
    assert dialogs == ["Delete this question and its answer? They cannot be brought back."]


def test_a_chat_is_asked_one_thing_at_a_time(fake, open_page):
    page = open_page(fake.url)
    ask(page, "One")
    ask(page, "Two")
    fake.engine.pause, fake.engine.answer = 0.5, "A very slow answer." * LONG
    page.click("[aria-label=Retry]")
    until(page, lambda: "A very" in page.inner_text("#bot"))
    send(page, "Three")
    page.wait_for_selector("text=An answer is being written; stop it first")
    page.locator("[data-do=delete]").first.dispatch_event("click")
    fake.engine.pause = 0.0
    until(page, lambda: fake.engine.answer in page.inner_text("#bot") and answered(page, 2))
    until(page, lambda: questions(page) == ["One", "Two"] and page.input_value(BOX) == "Three")
    page.press(BOX, "Enter")
    until(page, lambda: questions(page) == ["One", "Two", "Three"] and answered(page, 3))
    until(page, lambda: len(kept(page)) == 3 and page.input_value(BOX) == "")


LATE = """
const ask = window.fetch;
window.fetch = async (request, options) => {
    const response = await ask(request, options);
    if (!String(request.url ?? request).includes('/queue/data')) return response;
    const late = async (part, out) => { await new Promise((done) => setTimeout(done, 300)); out.enqueue(part); };
    return new Response(response.body.pipeThrough(new TransformStream({ transform: late })), response);
};
"""
"""Makes the results of events late, so that the next event begins while the end of their stream is under way."""


def test_an_event_that_begins_while_the_stream_of_results_ends_is_heard(fake, open_page):
    page = open_page(fake.url, before=LATE)
    for question in ("One", "Two", "Three", "Four"):
        send(page, question)
        until(page, lambda: [question, ANSWER] in kept(page))  # noqa: B023 (called at once)


@pytest.mark.parametrize("leave, left", [("new", ["One"]), ("delete", [])])
def test_a_chat_that_is_left_while_it_is_answered_does_not_return(fake, open_page, leave, left):
    page = open_page(fake.url)
    fake.engine.pause, fake.engine.answer = 0.5, "A very slow answer that nobody waits for." * LONG
    send(page, "One")
    until(page, lambda: "A very" in page.inner_text("#bot") and len(kept(page)) == 1)
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator(f"#store [data-act={leave}]").first.click()
    until(page, lambda: questions(page) == [] and not page.locator("#stop").is_visible())
    until(page, lambda: page.locator("body[data-answering]").count() == 0)
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert questions(page) == []
    assert [question for question, _ in kept(page)] == left
    assert all(text.startswith("A very") and text != fake.engine.answer for _, text in kept(page))


@pytest.mark.parametrize("leave", ["new", "delete"])
def test_a_quick_answer_after_a_chat_was_left_is_kept(fake, open_page, leave):
    page = open_page(fake.url)
    fake.engine.pause, fake.engine.answer = 0.5, "A very slow answer that nobody waits for." * LONG
    send(page, "One")
    until(page, lambda: "A very" in page.inner_text("#bot") and len(kept(page)) == 1)
    page.on("dialog", lambda dialog: dialog.accept())
    fake.engine.answer = ANSWER
    page.locator(f"#store [data-act={leave}]").first.click()
    send(page, "Two")  # while the first answer ends
    until(page, lambda: ["Two", ANSWER] in kept(page))
    until(page, lambda: questions(page) == ["Two"])


def test_chats_outlast_reloads_and_restarts_and_can_be_exported(fake, open_page):
    page = open_page(fake.url, expected=AWAY)
    ask(page, "What is **bold**?")
    until(page, lambda: kept(page) == [["What is **bold**?", ANSWER]])
    page.fill(BOX, "a draft")
    page.reload()
    page.wait_for_selector(ANSWERED)
    until(page, lambda: page.input_value(BOX) == "a draft")
    fake.stop()
    send(page, "Are you there?")
    page.wait_for_selector("#mpic-notice:has-text('does not answer')")
    with page.expect_event("load"):
        fake.start()
    page.wait_for_selector("body[data-ready]")
    until(page, lambda: page.input_value(BOX) == "Are you there?")
    page.press(BOX, "Enter")
    until(page, lambda: page.locator(ANSWERED).count() == 2)
    with page.expect_download() as exported:
        page.locator("[data-act=export]").first.click()
    assert ANSWER in exported.value.path().read_text()
    page.click("[data-act=new]")
    until(page, lambda: questions(page) == [])
    page.click("#store .mpic-chats [data-act=open]")
    until(page, lambda: len(questions(page)) == 2)


def test_a_page_whose_server_is_away_behind_it_says_so_and_stays(fake, open_page):
    page = open_page(fake.url, expected=("503",))
    page.evaluate("window.stays = true")
    page.route(
        "**/ui/alive", lambda route: route.fulfill(status=503, json={"error": {"code": "unavailable"}})
    )
    page.evaluate("dispatchEvent(new Event('online'))")
    page.wait_for_selector("#mpic-notice:has-text('does not answer')")
    assert page.evaluate("window.stays")
    page.unroute("**/ui/alive")
    page.wait_for_function("!window.stays")  # it is loaded anew when the server is back


def test_two_tabs_with_one_chat_lose_nothing(fake, open_page):
    one = open_page(fake.url)
    ask(one, "One")
    until(one, lambda: len(kept(one)) == 1)
    two = open_page(fake.url, context=one.context)
    until(two, lambda: questions(two) == ["One"])
    ask(two, "Two")
    until(one, lambda: questions(one) == ["One", "Two"])
    until(one, lambda: answered(one, 2))
    send(one, "Three")
    send(two, "Four")  # both write the chat at once
    until(one, lambda: len(questions(one)) == 4 and answered(one, 4))
    until(two, lambda: len(questions(two)) == 4 and answered(two, 4))
    until(one, lambda: sorted(kept(one)) == [[name, ANSWER] for name in ("Four", "One", "Three", "Two")])
    until(two, lambda: sorted(kept(two)) == sorted(kept(one)))


def test_handles_are_completed_by_keyboard_while_one_types(fake, open_page):
    add(fake, "RED", "REDDER", "BLUE")
    page = open_page(fake.url)
    page.wait_for_selector("#library [data-handle='IMAGE#BLUE']")
    page.click(BOX)
    page.keyboard.type("look at IMAGE#re")
    options = page.locator("#mpic-handles [role=option]")
    until(page, lambda: sorted(options.all_inner_texts()) == ["IMAGE#RED", "IMAGE#REDDER"])
    second = options.nth(1).inner_text()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    until(page, lambda: page.input_value(BOX) == f"look at {second} ")
    assert questions(page) == []
    page.keyboard.type("and IMAGE#B")
    page.keyboard.press("Escape")
    until(page, lambda: not page.locator("#mpic-handles").is_visible())
    assert focused(page) == "Your question"


def test_the_page_is_used_without_a_mouse(fake, open_page):
    page = open_page(fake.url)
    page.focus(BOX)
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    until(page, lambda: answered(page, 1))
    page.focus(f"{ANSWERED} summary")
    page.keyboard.press("Enter")
    page.wait_for_selector(".mpic-strip")
    tab_to(page, "Compare: answer again without reuse, side by side")
    page.keyboard.press("Enter")
    page.wait_for_selector(".mpic-verdict")


def test_a_file_is_opened_renamed_and_deleted(fake, open_page):
    fake.library.files.add("local", b"First line.\n\nSecond line.", "notes.txt", handle="NOTES")
    page = open_page(fake.url)
    ask(page, "FILE#NOTES What?")
    page.click("#library [data-do=open]")
    page.wait_for_selector(".mpic-document:has-text('Second line.')")
    handle = "#handle input, #handle textarea"
    until(page, lambda: page.input_value(handle) == "NOTES")
    page.fill(handle, "PAPER")
    page.click("#rename")
    page.wait_for_selector("#library [data-handle='FILE#PAPER']")
    page.click("[data-do=prefetch]")
    page.wait_for_selector("text=is brought near to the device")
    page.click("[data-do=pin]")
    page.wait_for_selector("[data-do=unpin]")
    page.wait_for_selector("#library [data-handle='FILE#PAPER']:has-text('pinned')")
    open_tab(page, "Chat")
    ask(page, "And again?")  # the first question is sent with the new handle
    assert page.locator(".mpic-error").count() == 0
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#library [data-do=open]")
    page.click("[data-do=remove]")
    page.wait_for_selector("#library:has-text('No files yet')")
    open_tab(page, "Chat")
    ask(page, "Still?")
    assert page.locator(".mpic-error").count() == 0


def test_an_admin_adds_finds_and_removes_references(fake, open_page, tmp_path):
    (tmp_path / "red.png").write_bytes(png())
    page = open_page(fake.url)
    open_tab(page, "References")
    page.wait_for_selector("#references:has-text('No references yet')")
    page.get_by_role("button", name="Add a reference").click()
    page.set_input_files("#new-reference input[type=file]", tmp_path / "red.png")
    page.fill("#new-title textarea, #new-title input", "A red square")
    page.wait_for_selector("#new-reference :text('red')")
    page.click("#put")
    page.wait_for_selector("#references [data-state=ready] img")
    page.click("#references [data-do=open]")
    page.wait_for_selector("#reference img.mpic-full")
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#references [data-do=remove]")
    page.wait_for_selector("#references:has-text('No references yet')")


def test_savings_policies_and_settings(fake, open_page):
    add(fake, "RED")
    page = open_page(fake.url)
    ask(page, "IMAGE#RED What?")
    open_tab(page, "Savings")
    page.wait_for_selector(".mpic-tiles:has-text('Not computed')")
    page.wait_for_selector(".vega-embed, canvas, svg.marks")
    open_tab(page, "Policies")
    page.wait_for_selector("td:text-is('mpic-16')")
    until(page, "[...document.querySelectorAll('.mpic-plots img')].length > 3")
    open_tab(page, "Settings")
    before = page.evaluate("localStorage['mpic-settings']")
    with page.expect_request(lambda request: "Be brief." in (request.post_data or "")):
        page.fill("#system textarea", "Be brief.")
    until(page, lambda: page.evaluate("localStorage['mpic-settings']") != before)
    page.reload()
    page.wait_for_selector("body[data-ready]")
    open_tab(page, "Settings")
    until(page, lambda: page.input_value("#system textarea") == "Be brief.")


def test_a_login_that_has_ended_is_told_and_chats_belong_to_their_user(fake, open_page):
    ann, key = fake.keys.create("ann")
    bob, _ = fake.keys.create("bob", limits=KeyLimits(concurrent=4))
    page = open_page(fake.url, ready=False, expected=("401",))
    log_in(page, ann)
    ask(page, "A secret of Ann")
    until(page, lambda: len(kept(page)) == 1)
    fake.keys.revoke(key.prefix)
    send(page, "Another one")
    page.wait_for_selector("#mpic-notice:has-text('Your login has ended')")
    page.click("#mpic-notice a")
    log_in(page, bob)
    until(page, lambda: questions(page) == [] and page.locator("#store [data-act=open]").count() == 0)
    assert page.locator("text=The server now").count() == 0  # for administrators
    page.click("button:text-is('Log out')")
    page.wait_for_selector("#key")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", [{}, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_in_our_own_parts(fake, open_page, scheme, device):
    if not SOURCE.exists():
        pytest.skip("axe-core is not here: tools/get_axe.sh gets it with npm")
    add(fake, "RED")
    page, audit = open_page(fake.url, color_scheme=scheme, bypass_csp=True, **device), Audit()
    audit.look(page)
    ask(page, "IMAGE#RED What?")
    page.click(f"{ANSWERED} summary")
    page.click("[data-do=compare]")
    page.wait_for_selector(".mpic-verdict")
    page.wait_for_selector("body:not([data-answering])")  # buttons are pale until then
    audit.look(page)
    for name in ("Library", "References", "Savings", "Policies", "Settings"):
        if page.get_by_role("tab", name=name).is_visible():
            open_tab(page, name)
            page.wait_for_timeout(300)
            audit.look(page)
    own = [found for found in audit.violations if "mpic" in found]
    assert audit.views >= 2 and own == []
    until(page, "document.documentElement.scrollWidth <= innerWidth")
