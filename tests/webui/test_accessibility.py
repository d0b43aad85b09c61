"""axe-core finds nothing on any view, light and dark; all is large enough for a finger, and works by keyboard."""

import pytest
from axe import SOURCE, Audit
from page_kit import BOX, PHONE, add, ask, focused, log_in, look, press, tab_to, until
from server_helpers import png

HIT_AREAS = """() => [...(document.querySelector('dialog:modal') || document).querySelectorAll(
    'button, a, input, select, textarea, summary')]
  .filter((e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && e.getClientRects().length
    && !e.closest('[inert], .unseen, .text') && e.id !== 'box' && !e.matches('.skip, [readonly]'))
  .map((e) => {
    const own = e.getBoundingClientRect(), after = getComputedStyle(e, '::after');
    const larger = after.content !== 'none' && after.position === 'absolute';
    const more = larger ? -parseFloat(after.top) - parseFloat(after.bottom) : 0;
    const box = e.type === 'checkbox' ? e.parentElement.getBoundingClientRect() : own;
    return [Math.round(box.width), Math.round(box.height + more), e.outerHTML.slice(0, 120)];
  })
  .filter(([width, height]) => width < 44 || height < 44)"""
"""Controls smaller than 44 x 44 px; axe-core's own rule asks for 24. The box of the question grows with its text."""


@pytest.fixture(scope="module")
def audit(figures):
    """Runs axe-core, and prints how much it examined after the module's tests."""
    if not SOURCE.exists():
        pytest.skip("axe-core is not here: tools/get_axe.sh gets it with npm")
    audit = Audit()
    yield audit
    counts = ", ".join(f"{what} {n:,}" for what, n in sorted(audit.count.items()))
    figures.append(f"axe-core: {audit.views} views, {len(audit.violations)} violations; {counts}")


def inspect(page, audit, view, touch=False):
    for colours in ("light", "dark"):
        page.emulate_media(color_scheme=colours)
        page.wait_for_timeout(50)
        assert audit.look(page) == [], f"{view}, {colours}"
    if touch:
        assert page.evaluate(HIT_AREAS) == [], view


def everywhere(page, touch):
    """Goes through all views and what opens on them; yields the name of each."""
    yield "chat, empty"
    ask(page, "IMAGE#RED and FILE#NOTES? " + "what? " * 2_000)
    page.fill(BOX, "")
    yield "chat, a refusal"
    ask(page, "IMAGE#RED and FILE#NOTES?")
    page.click(".turn:last-child .facts")
    yield "chat, an answer and its trace"
    page.click(".turn:last-child [data-key=more]")
    yield "menu of a turn"
    page.click(".menu-item:text-is('Answer again without reuse')")
    page.wait_for_selector(".verdict")
    yield "chat, a comparison"
    for n, picker in enumerate(("policy", "search")):
        page.click(f".picker >> nth={n}")
        yield f"picker: {picker}"
        page.keyboard.press("Escape")
    page.fill(BOX, "IMAGE#RED IMAGE#GONE or IMAGE")
    page.keyboard.type("#")
    page.wait_for_selector("#handle-list:visible")
    yield "handles offered, chips"
    page.keyboard.press("Escape")
    page.click("#chat-menu button")
    yield "menu of a chat"
    page.keyboard.press("Escape")
    for opener in ("#settings-open", ".block-head >> nth=0", ".block.document .block-head >> nth=0"):
        page.click(opener)
        page.wait_for_selector("dialog")
        page.wait_for_timeout(100)
        yield f"dialog of {opener}"
        page.keyboard.press("Escape")
    for view in ("references", "savings", "policies"):
        page.goto(page.url.split("#")[0] + f"#{view}")
        page.wait_for_selector(
            {"references": ".card", "savings": ".tile", "policies": "#view-policies .table"}[view]
        )
        for closed in page.locator("main details:not([open]) summary").all():
            if closed.is_visible():
                closed.click()
        yield view
    if touch:
        page.click("#side-open")
    yield "chats and files"
    page.click(".file .icon-button >> nth=0")
    yield "menu of a file"


@pytest.mark.parametrize("touch", [False, True], ids=["desk", "phone"])
def test_axe_finds_nothing_on_any_view_and_everything_is_large_enough_for_a_finger(
    audit, fake, open_page, touch
):
    add(fake, "RED")
    fake.library.files.add("local", b"Some notes.", "notes.txt", handle="NOTES")
    page = open_page(fake.url, expected=("404",), **(PHONE if touch else {}))
    form = {"title": "A", "file": {"name": "a.png", "mimeType": "image/png", "buffer": png()}}
    assert page.request.post(f"{fake.base}/v1/references", multipart=form).ok
    for view in everywhere(page, touch):
        inspect(page, audit, view, touch)


@pytest.mark.parametrize("touch", [False, True], ids=["desk", "phone"])
def test_axe_finds_nothing_where_one_logs_in(audit, fake, open_page, touch):
    key, made = fake.keys.create("ann")
    page = open_page(fake.url, ready=False, expected=("401",), **(PHONE if touch else {}))
    inspect(page, audit, "login", touch)
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.wait_for_selector("[role=alert]")
    inspect(page, audit, "a refused login", touch)
    log_in(page, key)
    fake.keys.revoke(made.prefix)
    look(page)
    page.wait_for_selector("#notice:has-text('logged out')")
    inspect(page, audit, "logged out", touch)
    page.click("#notice button")
    inspect(page, audit, "login in place", touch)


def test_tabbing_through_the_composer_opens_nothing_and_what_is_open_closes(fake, open_page):
    add(fake, "RED")
    page = open_page(fake.url)
    page.fill(BOX, "typed")
    page.focus(BOX)
    for _ in range(6):
        page.keyboard.press("Tab")
        assert page.locator(".pop-panel:visible, #handle-list:visible").count() == 0
    tab_to(page, "box", key="Shift+Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the policy picker
    assert page.locator(".picker-panel:visible").count() == 1
    page.keyboard.press("Tab")  # leaving it closes it
    assert page.locator(".pop-panel:visible").count() == 0 and page.input_value(BOX) == "typed"
    press(page, "Shift+Tab", "Enter", "Escape")
    assert page.locator(".pop-panel:visible").count() == 0 and "Policy" in focused(page)  # back where one was
    press(page, "Enter", "ArrowDown", "Enter")
    assert "mpic-32" in page.inner_text(".picker >> nth=0")


def test_a_whole_conversation_by_keyboard_alone(fake, open_page):
    add(fake, "RED", "GREEN")
    page = open_page(fake.url)
    assert focused(page) == "box"  # one may type at once
    page.keyboard.type("What is in image#")
    assert page.locator("#handle-list li").count() == 2
    page.wait_for_selector("#announcer:has-text('2 handles')", state="attached")
    press(page, "ArrowDown", "Enter")
    page.keyboard.type("and IMAGE#g")
    page.keyboard.press("Tab")
    page.keyboard.type("?")
    assert page.input_value(BOX) in (
        "What is in IMAGE#RED and IMAGE#GREEN ?",
        "What is in IMAGE#GREEN and IMAGE#GREEN ?",
    )
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn-line")
    assert focused(page) == "box"  # the next question may follow
    # said to screen readers
    page.wait_for_selector("#announcer:has-text('Answer: The tower')", state="attached")
    tab_to(page, "more", key="Shift+Tab")
    press(page, "Enter", "ArrowDown", "ArrowDown", "Enter")
    page.wait_for_selector(".verdict")
    tab_to(page, "facts", key="Shift+Tab")
    page.keyboard.press("Enter")
    assert focused(page) == "facts" and page.locator(".strip").count() == 2
    tab_to(page, "settings-open", key="Shift+Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    page.keyboard.press("Escape")
    assert focused(page) == "settings-open"


def test_a_skip_link_leads_past_the_side_and_a_drawer_gives_the_focus_back(fake, open_page):
    page = open_page(f"{fake.url}#policies")
    page.wait_for_selector(".table")
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the conversation"
    page.keyboard.press("Enter")
    assert focused(page) == "main"
    phone = open_page(fake.url, **PHONE)
    phone.focus("#side-open")
    phone.keyboard.press("Enter")
    assert focused(phone) == "side-close"
    phone.keyboard.press("Escape")
    assert focused(phone) == "side-open" and not phone.locator("#side").is_visible()


def test_a_finger_scrolls_the_list_of_handles_and_chooses_by_a_tap(fake, open_page):
    add(fake, *(f"RED{n}" for n in range(12)))
    page = open_page(fake.url, **PHONE)
    page.click(BOX)
    page.keyboard.type("IMAGE#")
    box = page.locator("#handle-list").bounding_box()
    x, y = box["x"] + 60, box["y"] + box["height"] / 2
    devtools = page.context.new_cdp_session(page)
    for type, points in [
        ("touchStart", [{"x": x, "y": y}]),
        *(("touchMove", [{"x": x, "y": y - 10 * n}]) for n in range(1, 12)),
        ("touchEnd", []),
    ]:
        devtools.send("Input.dispatchTouchEvent", {"type": type, "touchPoints": points})
    until(page, lambda: page.locator("#handle-list").evaluate("e => e.scrollTop") > 50)
    assert page.input_value(BOX) == "IMAGE#"
    page.wait_for_timeout(300)  # it has come to rest; a tap before that stops it
    page.touchscreen.tap(x, y)
    page.wait_for_selector("#handle-list", state="hidden")
    assert page.input_value(BOX).startswith("IMAGE#RED")
