"""Undo puts back one thing, and nothing that came after it is lost."""

from page_kit import BOX, ask, begin, kept, more, new_chat, open_chat, questions, reload, send, until


def shows(page, *expected):
    until(page, lambda: questions(page) == list(expected), steps=200)


def reload_when_kept(page):
    until(page, lambda: [text for text, _ in kept(page)] == questions(page))
    reload(page)


def undo(page, n):
    page.click(f".toast:nth-child({n}) >> text=Undo")


def test_undo_keeps_a_question_that_was_asked_after_the_deletion(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    ask(page, "two")
    more(page, 1, "Delete this turn")
    ask(page, "three")
    undo(page, 1)
    shows(page, "one", "two", "three")
    fake.engine.answer = "Another answer."
    more(page, 1, "Answer again")
    page.wait_for_selector(".turn:nth-child(1) .text:has-text('Another')")
    page.wait_for_selector(".turn:nth-child(1) .turn-line")
    ask(page, "four")
    undo(page, 1)
    page.wait_for_selector(".turn:nth-child(1) .text:has-text('taller')")
    shows(page, "one", "two", "three", "four")
    reload_when_kept(page)
    shows(page, "one", "two", "three", "four")


def test_turns_deleted_one_after_the_other_come_back_in_any_order_to_their_places(fake, open_page):
    page = open_page(fake.url)
    for text in ("one", "two", "three"):
        ask(page, text)
    for first in (1, 2):
        more(page, 1, "Delete this turn")
        more(page, 1, "Delete this turn")
        shows(page, "three")
        undo(page, first)
        undo(page, 1)
        shows(page, "one", "two", "three")
    reload_when_kept(page)
    shows(page, "one", "two", "three")


def test_undo_after_another_chat_was_opened_puts_the_turn_into_its_own_chat(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    ask(page, "two")
    more(page, 1, "Delete this turn")
    new_chat(page)
    open_chat(page)
    undo(page, 1)
    shows(page, "one", "two")
    more(page, 2, "Delete this turn")
    new_chat(page)
    undo(page, 1)
    page.wait_for_timeout(100)
    assert questions(page) == []
    page.click("#chat-list a")
    shows(page, "one", "two")


def test_undo_while_another_answer_is_written_leaves_no_turn_that_is_written_for_ever(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    fake.engine.pause = 0.3
    send(page, "two")
    page.wait_for_selector(".turn:nth-child(2) .writing")
    more(page, 1, "Delete this turn")
    undo(page, 1)
    fake.engine.pause = 0.0
    page.wait_for_selector(".turn:nth-child(2) .turn-line")
    assert page.locator(".writing").count() == 0
    shows(page, "one", "two")


def test_what_is_written_in_an_edit_box_stays_when_another_turn_is_deleted(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    ask(page, "two")
    more(page, 2, "Edit the question")
    page.fill(".edit-box", "two, and half")
    more(page, 1, "Delete this turn")
    assert page.input_value(".edit-box") == "two, and half"


def test_enter_and_escape_of_an_input_method_neither_send_nor_close(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    more(page, 1, "Edit the question")
    page.fill(".edit-box", "two")
    press = """(e, key) => {
        for (const how of [{ isComposing: true }, { keyCode: 229 }])
            e.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true, ...how })); }"""
    for key in ("Enter", "Escape"):
        page.locator(".edit-box").evaluate(press, key)
    assert page.input_value(".edit-box") == "two"
    page.fill(BOX, "three")
    page.locator(BOX).evaluate(press, "Enter")
    assert page.input_value(BOX) == "three" and page.locator(".turn").count() == 1


def test_all_chats_deleted_while_one_is_answered_stay_deleted_with_their_drafts(fake, open_page):
    page = open_page(fake.url)
    fake.engine.pause = 0.2
    begin(page, "one")
    page.click("#settings-open")
    page.click("dialog button:text-is('Delete all chats')")
    page.click("dialog button:text-is('Delete all')")
    page.wait_for_selector(".toast:has-text('All chats were deleted')")
    page.keyboard.press("Escape")
    fake.engine.pause = 0.0
    until(page, lambda: not fake.engine.held)
    page.wait_for_timeout(100)
    reload_when_kept(page)
    assert page.locator("#chat-list a").count() == 0 and page.locator(".turn").count() == 0


def test_a_deleted_chat_leaves_no_draft(fake, open_page):
    page = open_page(fake.url)
    page.clock.install()
    ask(page, "one")
    page.fill(BOX, "a secret draft")
    page.clock.run_for(500)
    assert page.evaluate("localStorage['mpic/local/drafts']").find("secret") > 0
    page.click("#chat-list .icon-button")
    page.click(".menu-item:text-is('Delete')")
    page.clock.run_for(11_000)
    until(page, "!localStorage['mpic/local/drafts'].includes('secret')")
