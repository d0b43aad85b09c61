"""Actions of a person who uses the page."""

from __future__ import annotations

from browsing import PATIENCE
from server_helpers import png

BOX = "#box textarea"
ANSWERED = ".mpic-facts"
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
AWAY = (
    "ERR_CONNECTION_REFUSED",
    "ERR_EMPTY_RESPONSE",
    "ERR_CONNECTION_RESET",
    "ERR_INCOMPLETE_CHUNKED_ENCODING",
    "network error",
    "Failed to fetch",
)
"""Complaints of the browser about a server that is not there."""


def send(page, text):
    """Ask, and wait for nothing."""
    page.fill(BOX, text)
    page.press(BOX, "Enter")


def ask(page, text):
    """Ask and wait for the end of the answer."""
    turns = page.locator(ANSWERED).count()
    send(page, text)
    until(page, lambda: answered(page, turns + 1))


def answered(page, turns):
    """Return whether so many turns have a whole answer and the page may be asked again."""
    return page.locator(ANSWERED).count() == turns and page.locator("[aria-label=Retry]").is_enabled()


def begin(page, text):
    """Ask and wait until the answer is being written."""
    send(page, text)
    page.wait_for_selector("[data-testid=bot]:has-text('The tower')")


def open_tab(page, name):
    page.get_by_role("tab", name=name).click()


def questions(page):
    """Return the questions that the page shows."""
    return [text.strip() for text in page.locator("#bot [data-testid=user]").all_inner_texts()]


def kept(page):
    """Return the question and the answer of every turn that the browser has stored."""
    return page.evaluate(
        """() => Object.keys(localStorage).filter((key) => key.startsWith('mpic-chat:'))
        .flatMap((key) => JSON.parse(localStorage[key]).turns.map((turn) => [turn.question, turn.answer.text]))"""
    )


def upload(page, *paths):
    page.set_input_files("#box input[type=file]", list(paths))


def add(fake, *handles, user="local"):
    """Put images into a user's library."""
    for handle in handles:
        fake.library.files.add(user, png(), f"{handle}.png", handle=handle)


def log_in(page, key):
    page.fill("#key", key)
    page.press("#key", "Enter")
    page.wait_for_selector("body[data-ready]")


def until(page, true, steps=PATIENCE // 20):
    """Wait until a script or a function returns something true."""
    for _ in range(steps):
        if true() if callable(true) else page.evaluate(true):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"{true} has not come about. The page shows:\n{page.inner_text('body')[:3000]}")


def focused(page):
    """Names what has the focus: its id, label or text."""
    return page.evaluate(
        """() => { const e = document.activeElement;
        return e.id || e.getAttribute('aria-label') || e.textContent.trim() || e.tagName; }"""
    )


def tab_to(page, name, most=80, key="Tab"):
    """Press Tab until something has the focus."""
    for _ in range(most):
        page.keyboard.press(key)
        if focused(page) == name:
            return
    raise AssertionError(f"Tab does not reach {name!r}")
