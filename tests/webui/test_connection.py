"""When the server disappears and returns, or a key ends, the page explains it and recovers by itself."""

from page_kit import AWAY, BOX, add, ask, begin, log_in, log_out, look, reload, send, until


def test_a_server_that_is_down_is_said_in_words_and_a_question_waits_for_it(fake, open_page):
    page = open_page(fake.url, expected=AWAY)
    add(fake, "RED")
    fake.stop()
    page.wait_for_selector("#notice:visible")  # nobody has clicked anything
    assert "cannot be reached" in page.inner_text("#notice") and "kept" not in page.inner_text("#toasts")
    send(page, "Are you there?")
    page.wait_for_selector("text=asked again as soon as it is back")
    fake.start()
    page.wait_for_selector(".turn-line")
    assert "taller" in page.inner_text(".text") and not page.locator("#notice").is_visible()
    page.wait_for_selector(".file[data-handle=RED]")  # what had changed meanwhile is shown


def test_an_answer_that_is_cut_off_is_kept_as_far_as_it_came_and_can_be_asked_again(fake, open_page):
    page = open_page(fake.url, expected=AWAY)
    fake.engine.pause = 0.5
    begin(page, "Tell me")
    fake.stop()
    page.wait_for_selector(".turn .error, .turn .hint")
    fake.start()
    page.wait_for_selector("#notice", state="hidden")
    if page.locator("[data-key=retry]").count():
        assert "The tower" in page.inner_text(".text")
        page.click("[data-key=retry]")
    page.wait_for_selector(".facts")
    assert "by far" in page.inner_text(".text")


def test_a_server_that_is_not_ready_says_why(fake, open_page):
    page = open_page(fake.url)
    fake.library.root.rename(fake.library.root.with_name("away"))
    look(page)
    page.wait_for_selector("#notice:has-text('not ready')")
    fake.library.root.with_name("away").rename(fake.library.root)
    page.wait_for_selector("#notice", state="hidden")


def test_a_key_that_ends_is_said_and_another_login_goes_on_where_one_was(fake, open_page):
    first, key = fake.keys.create("ann")
    page = open_page(fake.url, ready=False, expected=("401",))
    log_in(page, first)
    ask(page, "before")
    page.fill(BOX, "half a question")
    fake.keys.revoke(key.prefix)
    look(page)
    page.wait_for_selector("#notice:has-text('logged out')")
    page.click("#notice button")
    page.fill("dialog #key", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog .field-error:has-text('not known')")
    page.fill("dialog #key", fake.keys.create("ann")[0])
    page.keyboard.press("Enter")
    page.wait_for_selector("#notice", state="hidden")
    assert page.input_value(BOX) == "half a question" and page.locator(".turn").count() == 1
    ask(page, "after")


def test_a_login_the_chat_and_a_draft_outlast_the_server(fake, open_page):
    key, _ = fake.keys.create("ann")
    page = open_page(fake.url, ready=False, expected=("401", *AWAY))
    log_in(page, key)
    ask(page, "before")
    page.fill(BOX, "half a question")
    fake.stop()
    look(page)
    page.wait_for_selector("#notice:visible")
    fake.start()
    look(page)
    page.wait_for_selector("#notice", state="hidden")
    assert page.input_value(BOX) == "half a question"
    reload(page)
    assert page.input_value(BOX) == "half a question" and page.locator(".turn").count() == 1
    ask(page, "after")


def test_the_page_is_painted_before_the_server_has_said_anything_and_nothing_jumps(fake, open_page):
    add(fake, *(f"F{i}" for i in range(8)))
    page = open_page("about:blank", ready=False)
    held = []
    page.route("**/ui/about", lambda route: held.append(route))
    page.add_init_script(
        """window.shifts = [];
        new PerformanceObserver((list) => {
            for (const e of list.getEntries()) if (!e.hadRecentInput) shifts.push(e.value);
        }).observe({ type: 'layout-shift', buffered: true });"""
    )
    page.goto(fake.url)
    until(page, "performance.getEntriesByName('first-contentful-paint').length > 0")
    assert page.locator("#views").is_visible()
    assert page.locator(BOX).is_visible()
    assert page.locator("#send").is_visible()
    until(page, lambda: held)
    held[0].continue_()
    page.wait_for_selector("body[data-ready]")
    page.wait_for_selector(".file")
    page.wait_for_timeout(200)
    assert page.evaluate("shifts.reduce((a, b) => a + b, 0)") < 0.1


def test_an_answer_can_be_stopped_and_the_engine_is_told(fake, open_page):
    fake.engine.pause = 0.4
    page = open_page(fake.url)
    begin(page, "Tell me everything.")
    page.click("#stop")
    page.wait_for_selector(".stopped")
    assert page.locator("#send").is_visible() and not page.locator("#stop").is_visible()
    until(page, lambda: not fake.engine.held)


def test_a_hidden_page_does_not_ask(fake, open_page):
    page = open_page(fake.url)
    page.wait_for_load_state("networkidle")
    page.clock.install()
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.clock.run_for(10_000)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(600_000)
    page.wait_for_timeout(100)
    assert asked == []
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    until(page, lambda: any("/alive" in url for url in asked))


def test_an_open_page_becomes_that_of_the_user_who_logs_in_in_another_tab_before_it_sends_anything(
    fake, open_page
):
    keys = {name: fake.keys.create(name)[0] for name in ("ann", "bob")}
    add(fake, "BOBS", user="bob")
    page = open_page(fake.url, ready=False, expected=("401", "404", "ERR_FAILED"))
    log_in(page, keys["ann"])
    ask(page, "Ann's first question")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    send(page, "Ann's second question")
    page.route("**/ui/alive", lambda route: route.abort())
    page.wait_for_selector("text=asked again as soon as it is back")
    other = open_page(fake.url, context=page.context, expected=("401", "404"))
    log_out(other)
    log_in(other, keys["bob"])
    asked = len(fake.engine.requests)
    page.unroute("**/v1/chat/completions")
    page.unroute("**/ui/alive")
    page.wait_for_selector(".file[data-handle=BOBS]")
    assert "Ann" not in page.inner_text("body") and len(fake.engine.requests) == asked


def test_a_question_that_ends_the_connection_each_time_is_asked_three_times_and_then_said_to_have_failed(
    fake, open_page
):
    page, sent = open_page(fake.url, expected=("ERR_FAILED",)), []

    def lose(route):
        sent.append(route.request.url)
        route.abort()

    page.route("**/ui/v1/chat/completions", lose)
    send(page, "Too much for this server.")
    page.wait_for_selector("[data-key=retry]")
    assert len(sent) == 3
    page.unroute("**/ui/v1/chat/completions")
    page.click("[data-key=retry]")
    page.wait_for_selector(".turn-line:has-text('first token')")
