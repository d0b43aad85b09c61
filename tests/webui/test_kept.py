"""The browser keeps chats, drafts and settings with two tabs open, little room, or none at all."""

import pytest
from page_kit import BOX, ask, begin, kept, look, more, new_chat, open_chat, questions, reload, send, until

QUEUED = "text=asked again as soon as it is back"


def titles(page):
    """Returns the titles that the browser has stored."""
    return page.evaluate(
        "import('/ui/static/store.js').then(s => s.list()).then(all => all.map(c => c.title))"
    )


def states(page):
    """Returns the states of the answers that the browser has stored."""
    return page.evaluate(
        "import('/ui/static/store.js').then(s => s.list())"
        ".then(all => all.flatMap(c => c.turns.map(t => t.answer.state)))"
    )


def test_two_tabs_that_ask_in_one_chat_at_the_same_time_keep_both_questions(fake, open_page):
    page = open_page(fake.url)
    ask(page, "zero")
    other = open_page(page.url, context=page.context)
    fake.engine.pause = 0.2
    for tab, text in ((page, "one"), (other, "two")):
        send(tab, text)
    until(other, lambda: len(fake.engine.requests) == 3)
    fake.engine.pause = 0.0
    for tab in (page, other):
        until(tab, lambda tab=tab: tab.locator(".turn-line").count() == 3)
        assert sorted(questions(tab)) == ["one", "two", "zero"]
    more(other, 1, "Delete this turn")
    until(page, lambda: page.locator(".turn").count() == 2)
    reload(page)
    assert sorted(questions(page)) == ["one", "two"]


def test_a_tab_that_has_changed_nothing_leaves_the_drafts_and_settings_of_another_alone(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    other = open_page(page.url, context=page.context)
    other.fill(BOX, "a newer draft")
    other.evaluate("import('/ui/static/store.js').then(s => s.keep({ system: 'Be brief.' }))")
    page.evaluate("import('/ui/static/store.js').then(s => s.keep({ length: 7 }))")
    until(page, "(localStorage['mpic/local/drafts'] || '').includes('a newer draft')")
    other.close(run_before_unload=False)
    third = open_page(page.url, context=page.context)
    until(third, lambda: third.input_value(BOX) == "a newer draft")
    third.close()
    reload(page)
    assert page.input_value(BOX) == "a newer draft"
    kept = page.evaluate("import('/ui/static/store.js').then(s => [s.settings.system, s.settings.length])")
    assert kept == ["Be brief.", 7]


def test_a_long_draft_is_whole_after_another_view_and_another_chat(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    long = "word " * 20_000
    page.fill(BOX, long)
    for view in ("policies", "chat"):
        page.click(f"#views [data-view={view}]")
    assert page.input_value(BOX) == long
    new_chat(page)
    open_chat(page)
    assert page.input_value(BOX) == long


def test_a_draft_for_which_there_is_no_room_is_said_and_lasts_as_long_as_the_page(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    page.evaluate(
        "void (Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); })"
    )
    page.fill(BOX, "a draft")
    page.wait_for_selector(".toast:has-text('no room for this draft')")
    new_chat(page)
    open_chat(page)
    assert page.input_value(BOX) == "a draft"


def test_a_draft_of_a_new_chat_is_there_after_another_chat_was_opened(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    new_chat(page)
    page.fill(BOX, "for a new chat")
    open_chat(page)
    assert page.input_value(BOX) == ""
    new_chat(page)
    assert page.input_value(BOX) == "for a new chat"


def test_without_storage_the_page_works_and_says_once_that_nothing_is_kept(fake, open_page):
    page = open_page("about:blank", ready=False)
    page.add_init_script(
        """for (const name of ['localStorage', 'indexedDB'])
            Object.defineProperty(window, name, { get() { throw new DOMException('no', 'SecurityError'); } });"""
    )
    page.goto(fake.url)
    page.wait_for_selector("body[data-ready]")
    assert page.locator(".toast:has-text('keeps nothing of this page')").count() == 1
    ask(page, "one")
    new_chat(page)
    open_chat(page)
    assert questions(page) == ["one"]


def test_a_chat_is_kept_only_when_the_browser_has_committed_it(fake, open_page):
    page = open_page(fake.url)
    said = page.evaluate(
        """async () => {
            const store = await import('/ui/static/store.js'), put = IDBObjectStore.prototype.put;
            IDBObjectStore.prototype.put = function (value) {
                const made = put.call(this, value);
                made.addEventListener('success', () => this.transaction.abort());
                return made;
            };
            const one = { id: 'a', title: 'A', created: 1, updated: 1, turns: [] };
            try { await store.save(one); return 'kept'; } catch { return 'refused'; }
        }"""
    )
    assert said == "refused"


def test_every_question_asked_while_the_server_is_away_is_answered_in_order(fake, open_page):
    away = ("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET")
    page = open_page(fake.url, expected=away)
    fake.stop()
    look(page)
    page.wait_for_selector("#notice:visible")
    for n, text in enumerate(("one", "two", "three"), 1):
        send(page, text)
        until(page, lambda n=n: page.locator(QUEUED).count() == n)
    fake.start()
    look(page)
    page.wait_for_selector(".turn:nth-child(3) .turn-line")
    assert page.locator(".turn-line").count() == 3
    assert questions(page) == ["one", "two", "three"] and len(fake.engine.requests) == 3


def test_the_link_to_the_chat_leads_back_to_an_answer_that_is_being_written(fake, open_page):
    page = open_page(fake.url)
    fake.engine.pause = 0.2
    begin(page, "one")
    page.click("#views [data-view=policies]")
    page.wait_for_selector("#view-policies:visible")
    page.click("#views [data-view=chat]")
    fake.engine.pause = 0.0
    page.wait_for_selector(".turn-line")
    assert "by far" in page.inner_text(".text") and page.locator(".stopped").count() == 0
    assert page.inner_text("#title") == "one" and page.locator("#chat-menu button").count() == 1


def test_bringing_back_a_chat_that_made_way_says_which_other_makes_way(fake, open_page):
    page = open_page(fake.url)
    page.evaluate(
        """async () => {
            const store = await import('/ui/static/store.js');
            for (let i = 0; i < store.MOST_CHATS; i++)
                await store.save({ id: `old${i}`, title: `Old ${i}`, created: i, updated: i + 1, turns: [] });
        }"""
    )
    ask(page, "one more")
    page.click(".toast:has-text('“Old 0”') >> text=Undo")
    page.wait_for_selector(".toast:has-text('the oldest, “Old 1”, was removed')")


def test_a_draft_stays_with_a_chat_that_was_new_when_its_question_was_asked(fake, open_page):
    page = open_page(fake.url)
    page.click("#new-chat")
    until(page, "location.hash === '#chat'")
    ask(page, "one")
    page.fill(BOX, "a follow-up")
    new_chat(page)
    assert page.input_value(BOX) == ""
    open_chat(page)
    assert page.input_value(BOX) == "a follow-up"


def test_a_title_given_in_one_tab_outlasts_questions_in_another_tab(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    other = open_page(page.url, context=page.context)
    new_chat(page)
    page.click("#chat-list .icon-button")
    page.click(".menu-item:text-is('Rename')")
    page.fill("dialog input", "A better title")
    page.keyboard.press("Enter")
    other.wait_for_selector("#title:text-is('A better title')")
    ask(other, "two")
    assert titles(other) == ["A better title"]


def test_a_title_that_an_undo_brings_back_comes_back_in_another_tab(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    more(page, 1, "Edit the question")
    page.fill(".edit-box", "two")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn-line")
    page.wait_for_selector("#title:text-is('two')")
    other = open_page(page.url, context=page.context)
    new_chat(page)
    page.click(".toast >> text=Undo")
    other.wait_for_selector("#title:text-is('one')")
    assert questions(other) == ["one"]


def test_an_answer_whose_tab_is_closed_is_shown_as_stopped_in_another_tab(fake, open_page):
    page = open_page(fake.url)
    ask(page, "zero")
    other = open_page(page.url, context=page.context)
    fake.engine.pause = 1.5  # longer than the page waits before it keeps what has come
    begin(page, "one")
    other.wait_for_selector(".turn:nth-child(2) .writing")
    page.goto("about:blank")
    other.wait_for_selector(".turn:nth-child(2) .stopped")
    assert other.locator(".writing, .dots").count() == 0
    until(other, lambda: len(kept(other)) == 2 and "stopped" in states(other))


def delete_chat(page):
    page.clock.install()
    page.click("#chat-list .icon-button")
    page.click(".menu-item:text-is('Delete')")
    page.clock.run_for(11_000)


def test_what_is_typed_into_a_chat_that_another_tab_deletes_goes_on_in_a_new_one(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    other = open_page(page.url, context=page.context)
    page.fill(BOX, "a long thought")
    delete_chat(other)
    page.wait_for_selector(".toast:has-text('deleted in another tab')")
    page.wait_for_selector("#welcome:visible")
    assert page.input_value(BOX) == "a long thought"
    until(page, "location.hash === '#chat'")
    reload(page)
    assert page.input_value(BOX) == "a long thought"


@pytest.mark.parametrize("moved", ["a long thought", "an earlier one\na long thought"])
def test_a_draft_that_another_tab_has_moved_to_the_new_chat_already_is_there_once(fake, open_page, moved):
    page = open_page(fake.url)
    ask(page, "one")
    other = open_page(page.url, context=page.context)
    page.fill(BOX, "a long thought")
    page.evaluate("text => import('/ui/static/store.js').then(s => s.keepDraft('', text))", moved)
    delete_chat(other)
    page.wait_for_selector(".toast:has-text('deleted in another tab')")
    page.wait_for_selector("#welcome:visible")
    assert page.input_value(BOX) == moved


def test_another_view_stays_when_another_tab_deletes_the_open_chat(fake, open_page):
    page = open_page(fake.url)
    ask(page, "one")
    other = open_page(page.url, context=page.context)
    page.click("#views [data-view=policies]")
    page.wait_for_selector("#view-policies:visible")
    delete_chat(other)
    page.wait_for_selector(".toast:has-text('deleted in another tab')")
    page.wait_for_timeout(100)
    assert page.locator("#view-policies").is_visible()


def test_an_export_that_fails_says_so(fake, open_page):
    page = open_page(fake.url, expected=("it is damaged",))
    page.evaluate("void (IDBObjectStore.prototype.getAll = () => { throw new Error('it is damaged'); })")
    page.click("#settings-open")
    page.click("dialog button:text-is('Export all chats')")
    page.wait_for_selector(".toast:has-text('it is damaged')", state="attached")
