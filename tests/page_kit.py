"""Actions of a person who uses the page."""

from __future__ import annotations

from server_helpers import png
from small_models import SMALL_SAMPLES

BOX = "#box"
AWAY = ("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE")
AWAY += ("ERR_CONNECTION_RESET", "ERR_INCOMPLETE_CHUNKED_ENCODING")
"""Complaints of the browser about a server that is not there."""
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
TABLET = {"viewport": {"width": 820, "height": 1180}, "has_touch": True}


def ask(page, text):
    """Asks and waits for the end of the answer."""
    turns = page.locator(".turn").count()
    send(page, text)
    page.wait_for_selector(f".turn:nth-child({turns + 1}) .turn-line")


def send(page, text):
    """Asks, and waits for nothing."""
    page.fill(BOX, text)
    page.press(BOX, "Enter")


def begin(page, text):
    """Asks and waits until the answer is being written."""
    send(page, text)
    page.wait_for_selector(".writing")


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def reload(page):
    """Loads the page again and waits until it is ready."""
    page.reload()
    page.wait_for_selector("body[data-ready]")


def new_chat(page):
    """Begins a chat and waits until it is shown."""
    page.click("#new-chat")
    page.wait_for_selector("#welcome:visible")


def open_chat(page):
    """Opens the newest chat of the list."""
    page.click("#chat-list a")
    page.wait_for_selector(".turn")


def questions(page):
    """Returns the questions that the page shows."""
    return [text.removeprefix("You asked:").strip() for text in page.locator(".bubble").all_inner_texts()]


def more(page, turn, action):
    """Chooses an action of a turn's menu."""
    page.click(f".turn:nth-child({turn}) [data-key=more]")
    page.click(f".menu-item:text-is('{action}')")


def kept(page):
    """Returns the question and the answer of every turn that the browser has stored."""
    return page.evaluate(
        """import('/ui/static/store.js').then(s => s.list())
        .then(all => all.flatMap(c => c.turns.map(t => [t.text, t.answer?.text || ''])))"""
    )


def upload(page, *names):
    page.set_input_files("#file-input", [SMALL_SAMPLES / name for name in names])
    for name in names:
        page.wait_for_selector(f'.file[data-handle="{name.split(".")[0].upper()}"][data-state=ready]')


def empty(library, user="local"):
    for file in library.files.page(user).files:
        library.files.delete(user, file.id)


def add(fake, *handles, user="local"):
    """Puts images into a user's library."""
    for handle in handles:
        fake.library.files.add(user, png(), f"{handle}.png", handle=handle)


def log_in(page, key):
    page.fill("#key", key)
    page.press("#key", "Enter")
    page.wait_for_selector("body[data-ready]")


def log_out(page):
    page.click("#logout button")
    page.wait_for_selector("#key")


def until(page, true, steps=1000):
    """Waits until a script or a function returns something true. (Playwright's own waiting for functions needs
    ``eval``, which the page forbids.)"""
    for _ in range(steps):
        if true() if callable(true) else page.evaluate(true):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"{true} has not come about")


def look(page):
    """Makes the page check for the server now, not after seconds."""
    page.evaluate("dispatchEvent(new Event('online'))")


def focused(page):
    """Names what has the focus: its id, key, label or text."""
    return page.evaluate(
        """() => { const e = document.activeElement;
        return e.id || e.dataset.key || e.getAttribute('aria-label') || e.textContent.trim(); }"""
    )


def tab_to(page, name, most=60, key="Tab"):
    """Presses Tab until something has the focus."""
    for _ in range(most):
        page.keyboard.press(key)
        if focused(page) == name:
            return
    raise AssertionError(f"Tab does not reach {name!r}")
