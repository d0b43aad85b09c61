"""Answers as the page shows them: their markup, their history, and what is compared with what."""

from page_kit import add, ask, more, reload


def sent_by(page, act):
    """Returns the body of the request that ``act`` makes."""
    with page.expect_request("**/v1/chat/completions") as asked:
        act()
    return asked.value.post_data_json


def test_numbered_lists_continue_their_numbers(fake, open_page):
    fake.engine.answer = "1. one\n\n   - inside\n\n2. two\n\n7) seven\n8) eight"
    page = open_page(fake.url)
    ask(page, "what?")
    assert page.locator(".text ol").evaluate_all("all => all.map(e => e.start)") == [1, 2, 7]
    assert page.locator(".text ol li").all_inner_texts() == ["one", "two", "seven", "eight"]


def test_quotes_within_quotes_end_at_a_depth_and_the_rest_is_text(fake, open_page):
    fake.engine.answer = ">" * 20_000 + " deep"
    page = open_page(fake.url)
    ask(page, "what?")
    assert page.locator(".text blockquote").count() == 8
    assert page.inner_text(".text").strip().endswith("> deep")


def test_a_chat_goes_on_after_its_files_were_renamed_deleted_or_replaced(fake, open_page):
    add(fake, "RED", "CAT", "DOG")
    page = open_page(fake.url)
    ask(page, "IMAGE#RED, IMAGE#CAT and image IMAGE#DOG. What?")
    files = fake.library.files
    files.rename("local", files.by_handle("local", "RED").id, "CRIMSON")
    for gone in ("CAT", "DOG"):
        files.delete("local", files.by_handle("local", gone).id)
    add(fake, "CAT")  # another one
    reload(page)
    body = sent_by(page, lambda: ask(page, "And now?"))
    assert body["messages"][0]["content"] == "IMAGE#CRIMSON, CAT and image DOG. What?"
    assert page.locator(".error").count() == 0 and "taller" in page.inner_text(".turn:nth-child(2) .text")
    assert len(fake.engine.requests[-1].prompt.chunks) == 1


def ask_for_files(page):
    """Makes the page ask for the list of files now, not within a minute."""
    page.evaluate("import('/ui/static/files.js').then(f => f.refresh())")


def test_a_file_that_another_tab_has_just_added_stays_in_the_question_that_names_it(fake, open_page):
    page = open_page(fake.url)
    ask(page, "hello")
    other = open_page(page.url, context=page.context)
    add(fake, "NEW")
    ask_for_files(other)
    ask(other, "IMAGE#NEW what?")
    page.wait_for_selector(".turn:nth-child(2) .turn-line")
    body = sent_by(page, lambda: ask(page, "And now?"))
    assert body["messages"][2]["content"] == "IMAGE#NEW what?"
    assert len(fake.engine.requests[-1].prompt.chunks) == 1


def test_a_file_that_was_added_before_a_question_was_answered_again_stays_in_it(fake, open_page):
    page = open_page(fake.url, expected=("404",))
    ask(page, "IMAGE#NEW what?")
    other = open_page(page.url, context=page.context)
    ask_for_files(other)
    add(fake, "NEW")
    ask_for_files(page)
    page.click("[data-key=retry]")
    other.wait_for_selector(".text:has-text('taller')")
    other.wait_for_selector("[data-key=compare]")
    body = sent_by(other, lambda: ask(other, "And now?"))
    assert body["messages"][0]["content"] == "IMAGE#NEW what?"


def test_a_file_that_is_missing_in_a_list_of_the_newest_stays_unless_another_has_its_name(fake, open_page):
    add(fake, "RED", "CAT")
    page = open_page(fake.url, expected=("404",))  # the picture of the file that is gone
    ask(page, "IMAGE#RED and IMAGE#CAT. What?")
    fake.library.files.delete("local", fake.library.files.by_handle("local", "CAT").id)
    add(fake, "CAT")  # another one
    page.route("**/ui/v1/files", lambda route: route.continue_(url=f"{route.request.url}?limit=1"))
    reload(page)
    page.wait_for_selector(".file")
    assert page.locator(".file").count() == 1
    body = sent_by(page, lambda: ask(page, "And now?"))
    assert body["messages"][0]["content"] == "IMAGE#RED and CAT. What?"
    assert page.locator(".error").count() == 0 and len(fake.engine.requests[-1].prompt.chunks) == 1


def test_a_question_that_is_asked_again_finds_the_file_that_was_renamed(fake, open_page):
    add(fake, "RED")
    page = open_page(fake.url)
    ask(page, "IMAGE#RED what?")
    files = fake.library.files
    files.rename("local", files.by_handle("local", "RED").id, "CRIMSON")
    reload(page)
    page.click("[data-key=compare]")
    page.wait_for_selector(".verdict")
    more(page, 1, "Answer again")
    page.wait_for_selector("button.chip:has-text('CRIMSON')")
    page.wait_for_selector(".turn-line")
    assert page.locator(".error").count() == 0 and len(fake.engine.requests) == 3


def settings(page, **values):
    page.click("#settings-open")
    for name, value in values.items():
        page.fill(f"#set-{name}", value)
        page.press(f"#set-{name}", "Tab")
    page.keyboard.press("Escape")


def test_a_comparison_asks_for_the_same_whatever_the_settings_say_by_now(fake, open_page):
    page = open_page(fake.url)
    settings(page, system="Be brief.", temperature="0.5", length="3")
    first = sent_by(page, lambda: ask(page, "hello"))
    settings(page, system="Be verbose.", temperature="0", length="9")
    fake.engine.answer = "Another tower is"
    again = sent_by(page, lambda: page.click("[data-key=compare]"))
    assert {**again, "mpic": first["mpic"]} == first and again["mpic"]["policy"] == "full"
    page.wait_for_selector(".verdict:has-text('At temperature 0.5 two answers may differ by chance')")


def test_a_comparison_with_an_answer_that_has_no_temperature_names_the_one_that_it_asked_for(fake, open_page):
    page = open_page(fake.url)
    settings(page, temperature="0.5")
    ask(page, "hello")
    page.evaluate(  # as earlier versions of the page kept it
        """async () => {
            const store = await import('/ui/static/store.js'), [chat] = await store.list();
            delete chat.turns[0].answer.temperature;
            await store.save(chat);
        }"""
    )
    reload(page)
    fake.engine.answer = "Another answer."
    page.click("[data-key=compare]")
    page.wait_for_selector(".verdict.differs")
    assert "At temperature 0.5 two answers" in page.inner_text(".verdict")


def test_without_a_temperature_a_difference_is_not_put_down_to_chance(fake, open_page):
    page = open_page(fake.url)
    ask(page, "hello")
    fake.engine.answer = "Another answer."
    page.click("[data-key=compare]")
    page.wait_for_selector(".verdict.differs")
    assert "by chance" not in page.inner_text(".verdict")


def test_a_longest_answer_that_is_cleared_is_the_default_again(fake, open_page):
    page = open_page(fake.url)
    settings(page, length="7")
    settings(page, length="")
    assert sent_by(page, lambda: ask(page, "hello"))["max_tokens"] == 512


def test_a_policy_that_reads_no_chunk_is_asked_for_without_a_press(fake, open_page):
    page = open_page(fake.url)
    page.click("#settings-open")
    page.select_option("#set-press", "snapkv-50")
    page.keyboard.press("Escape")
    page.click(".picker >> nth=0")
    page.keyboard.type("full")
    page.keyboard.press("Enter")
    assert "press" not in sent_by(page, lambda: ask(page, "hello"))["mpic"]
    assert page.locator(".error").count() == 0


def test_a_policy_that_the_engine_does_not_run_is_refused_while_it_is_typed_and_dropped_if_it_was_kept(
    fake, open_page
):
    fake.engine.provides = frozenset()
    page = open_page(fake.url)
    page.click(".picker >> nth=0")
    page.keyboard.type("cacheblend-17")
    page.wait_for_selector(".picker-status:has-text('does not run on this server')")
    page.evaluate("import('/ui/static/store.js').then(s => s.keep({ policy: 'cacheblend-17' }))")
    reload(page)
    page.wait_for_selector(".toast:has-text('does not offer the policy cacheblend-17')")
    assert "policy" not in sent_by(page, lambda: ask(page, "hello"))["mpic"]
