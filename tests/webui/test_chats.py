"""Chats are kept: through reloads, restarts and logins; nothing is lost by one click."""

import json
from pathlib import Path

from page_kit import (
    AWAY,
    BOX,
    add,
    ask,
    kept,
    log_in,
    log_out,
    more,
    new_chat,
    open_chat,
    questions,
    reload,
    until,
)

HOSTILE = "<img src=x onerror=alert(1)> ${1+1} {{value}} `x` </textarea> \"'&"


def titles(page):
    return page.locator("#chat-list a").all_inner_texts()


def test_chats_survive_reload_and_restart_and_can_be_opened_renamed_exported(fake, open_page):
    page = open_page(fake.url, expected=AWAY)
    ask(page, "What is the first thing?")
    ask(page, "And the second?")
    new_chat(page)
    ask(page, "Something else")
    assert titles(page) == ["Something else", "What is the first thing?"]  # "New chat" has lost nothing
    fake.stop()
    fake.start()
    reload(page)
    # where one was
    assert page.locator(".turn").count() == 1 and "Something else" in page.inner_text(".bubble")
    page.click("#chat-list a:has-text('What is the first')")
    page.wait_for_selector(".turn:nth-child(2)")
    assert "taller than the museum" in page.inner_text(".turn:nth-child(2) .text")

    page.click("#chat-menu .icon-button")
    page.click(".menu-item:text-is('Rename')")
    page.fill("dialog input", "<b>Two</b> things")
    page.keyboard.press("Enter")
    page.wait_for_selector("#chat-list a:has-text('<b>Two</b> things')")
    assert page.inner_text("#title") == "<b>Two</b> things"
    for form, name in (("Markdown", "b-Two-b-things.md"), ("JSON", "b-Two-b-things.json")):
        page.click("#chat-menu .icon-button")
        with page.expect_download() as got:
            page.click(f".menu-item:text-is('Export as {form}')")
        assert got.value.suggested_filename == name
        text = Path(got.value.path()).read_text(encoding="utf-8")
        assert "What is the first thing?" in text and "taller than the museum" in text
    assert [turn["answer"]["state"] for turn in json.loads(text)["turns"]] == ["done", "done"]


def test_a_deleted_chat_comes_back_within_ten_seconds_and_then_is_gone(fake, open_page):
    page = open_page(fake.url)
    page.clock.install()
    ask(page, "Keep this")

    def delete():
        page.click("#chat-list .icon-button")
        page.click(".menu-item:text-is('Delete')")
        page.wait_for_selector("#chats-empty:visible")

    delete()
    page.clock.run_for(5_000)
    page.click(".toast >> text=Undo")
    page.wait_for_selector("#chat-list a")
    assert "Keep this" in page.inner_text(".bubble")
    page.clock.run_for(30_000)
    page.wait_for_timeout(100)
    assert page.evaluate("import('/ui/static/store.js').then(s => s.list()).then(all => all.length)") == 1
    delete()
    page.clock.run_for(11_000)
    page.wait_for_selector(".toast", state="detached")
    until(page, "import('/ui/static/store.js').then(s => s.list()).then(all => !all.length)")
    reload(page)
    assert titles(page) == []


def test_turns_are_edited_answered_again_and_deleted_and_each_can_be_taken_back(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    ask(page, "two")
    undo = lambda: page.click(".toast:last-child >> text=Undo")

    more(page, 1, "Delete this turn")
    assert questions(page) == ["two"]
    undo()
    assert questions(page) == ["one", "two"]
    more(page, 1, "Edit the question")
    page.fill(".edit-box", "one, in other words")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn .turn-line")
    assert questions(page) == ["one, in other words"]
    undo()
    assert questions(page) == ["one", "two"]
    fake.engine.answer = "Another answer."
    more(page, 2, "Answer again")
    page.wait_for_selector(".turn:nth-child(2) .text:has-text('Another answer.')")
    page.wait_for_selector(".turn:nth-child(2) .turn-line")
    undo()
    until(page, lambda: "taller" in page.inner_text(".turn:nth-child(2) .text"))
    until(page, lambda: [text for text, _ in kept(page)] == ["one", "two"] and "taller" in kept(page)[1][1])
    reload(page)
    assert questions(page) == ["one", "two"] and "taller" in page.inner_text(".turn:nth-child(2) .text")


def test_a_deleted_file_comes_back_within_ten_seconds_and_leaving_the_page_deletes_it(fake, open_page):
    add(fake, "RED")
    page = open_page(fake.url)

    def delete():
        page.click("[aria-label='More about IMAGE#RED']")
        page.click(".menu-item:text-is('Delete')")
        page.wait_for_selector(".file", state="detached")

    delete()
    assert len(fake.library.files.page("local").files) == 1  # not yet
    page.click(".toast >> text=Undo")
    page.wait_for_selector(".file")
    delete()
    page.goto("about:blank")
    other = open_page(fake.url)
    until(other, lambda: not fake.library.files.page("local").files)


def test_drafts_survive_a_reload_another_chat_and_a_login(fake, open_page):
    key, _ = fake.keys.create("ann")
    page = open_page(fake.url, ready=False, expected=("401",))
    log_in(page, key)
    ask(page, "a chat")
    page.fill(BOX, "a draft here")
    new_chat(page)
    assert page.input_value(BOX) == ""
    page.fill(BOX, "and one for a new chat")
    log_out(page)
    log_in(page, key)
    assert page.input_value(BOX) == "and one for a new chat"
    open_chat(page)
    assert page.input_value(BOX) == "a draft here"


def test_two_people_share_a_browser_and_neither_sees_anything_of_the_other(fake, open_page):
    keys = {name: fake.keys.create(name)[0] for name in ("ann", "bob")}
    add(fake, "ANNS", user="ann")
    page = open_page(fake.url, ready=False, expected=("401", "404"))
    assert page.url.endswith("/ui/login")
    page.fill("#key", "mpic_no")
    page.keyboard.press("Enter")
    assert "not known" in page.inner_text("[role=alert]")
    log_in(page, keys["ann"])
    [cookie] = page.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and cookie["path"] == "/ui"
    assert keys["ann"] not in cookie["value"]
    ask(page, "Ann's secret")
    anns, id = page.url, page.get_attribute(".file", "data-id")
    page.fill(BOX, "Ann's draft")
    log_out(page)
    log_in(page, keys["bob"])
    page.goto(anns)  # her chat's own address
    page.wait_for_selector("body[data-ready]")
    page.go_back()
    page.wait_for_selector("body[data-ready]")
    assert titles(page) == [] and page.locator(".turn").count() == 0 and page.input_value(BOX) == ""
    assert "Ann" not in page.content() and page.locator(".file").count() == 0
    assert page.evaluate("id => fetch(`/ui/thumbs/${id}`).then(r => r.status)", id) == 404
    log_out(page)
    log_in(page, keys["ann"])
    assert titles(page) == ["Ann's secret"]


def test_no_more_chats_are_kept_than_the_bound_and_the_visitor_is_told(fake, open_page):
    page = open_page(fake.url)
    page.evaluate(
        """async () => {
            const store = await import('/ui/static/store.js');
            for (let i = 0; i < store.MOST_CHATS; i++) {
                await store.save(
                    { id: `old${i}`, title: `Old ${i}`, named: false, created: i, updated: i + 1, turns: [] });
            }
        }"""
    )
    ask(page, "one more")
    assert "the oldest, “Old 0”, was removed" in page.inner_text(".toast")
    assert page.evaluate("import('/ui/static/store.js').then(s => s.list()).then(all => all.length)") == 300


def test_text_of_people_and_models_is_never_markup(fake, open_page):
    fake.engine.answer = HOSTILE + " **bold** [x](javascript:alert(1)) ![p](http://a.example/p.png)"
    fake.library.files.add("local", b"text", "<img src=x onerror=alert(2)>.txt", handle=None)
    fake.library.files.add("local", HOSTILE.encode(), "hostile.txt", handle="DOC")
    page = open_page(fake.url)
    ask(page, f"{HOSTILE} FILE#DOC")
    assert HOSTILE in page.inner_text(".bubble") and "<img src=x onerror=alert(1)>" in page.inner_text(
        ".text"
    )
    assert page.inner_text(".text strong") == "bold" and "javascript:alert" in page.inner_text(".text")
    assert page.locator(".bubble img, .text img, .text a[href^=javascript], #side img[src=x]").count() == 0
    page.click("button.chip")
    page.wait_for_selector("dialog .chunk")
    assert HOSTILE in page.inner_text("dialog .chunk pre")
    assert "<img src=x onerror=alert(2)>.txt" in page.inner_text("#file-list")
    page.keyboard.press("Escape")
    reload(page)
    assert HOSTILE in page.inner_text(".bubble") and page.title().startswith("<img src=x onerror=alert(1)>")
