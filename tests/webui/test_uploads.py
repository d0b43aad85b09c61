"""Uploads end with a file or with words; a server that answers late or refuses is said, and holds nothing else up."""

import base64
import json

from page_kit import PHONE, ask, log_in, log_out, until
from server_helpers import png

HANDLE = '.file[data-handle="{}"]'


def put(page, *names):
    page.set_input_files(
        "#file-input", [{"name": name, "mimeType": "image/png", "buffer": png()} for name in names]
    )


def catch_posts(page, pattern, handle):
    """Hands over what the page would send there."""
    page.route(pattern, lambda route: handle(route) if route.request.method == "POST" else route.continue_())


def test_a_hundredth_file_with_the_same_name_gets_a_handle(fake, open_page):
    for n in range(1, 101):
        handle = "FILE" if n == 1 else f"FILE_{n}"
        fake.library.files.add("local", f"text {n}".encode(), "x.txt", handle=handle)
    page = open_page(fake.url)
    put(page, "写真.png")
    page.wait_for_selector(HANDLE.format("FILE_101"))
    assert page.locator(".upload").count() == 0


def test_a_handle_that_is_taken_again_and_again_ends_with_words_and_not_with_a_hundred_uploads(
    fake, open_page
):
    page = open_page(fake.url, expected=("409",))
    sent = []

    def refuse(route):
        sent.append(route.request.url)
        error = {"error": {"code": "handle_taken", "message": "you already have a file with this handle"}}
        route.fulfill(status=409, content_type="application/json", body=json.dumps(error))

    catch_posts(page, "**/ui/v1/files", refuse)
    put(page, "写真.png")
    page.wait_for_selector(".upload.failed:has-text('you already have')")
    assert 1 < len(sent) < 10


def test_a_failed_upload_can_be_tried_again_and_is_then_there_once(fake, open_page):
    page = open_page(fake.url, expected=("ERR_FAILED", "ERR_CONNECTION"))

    def lose(route):
        route.fetch()  # the server has the file, but its answer does not arrive
        route.abort()

    catch_posts(page, "**/ui/v1/files", lose)
    put(page, "photo.png")
    page.wait_for_selector(".upload.failed")
    page.unroute("**/ui/v1/files")
    page.click(".upload >> text=Try again")
    page.wait_for_selector(HANDLE.format("PHOTO"))
    until(page, "document.querySelector('#box').value.includes('IMAGE#PHOTO')")
    assert len(fake.library.files.page("local").files) == 1 and page.locator(".upload").count() == 0


def test_a_library_that_the_server_refuses_to_list_is_not_shown_as_empty(fake, open_page):
    page = open_page("about:blank", ready=False, expected=("429",))
    error = {"error": {"code": "rate_limited", "message": "too many requests"}}
    page.route(
        "**/ui/v1/files",
        lambda route: route.fulfill(status=429, content_type="application/json", body=json.dumps(error)),
    )
    page.goto(fake.url)
    page.wait_for_selector("#library-note:has-text('could not be listed: too many requests')")


def test_a_request_that_gets_no_answer_gives_way_to_the_next(fake, open_page):
    page = open_page("about:blank", ready=False)
    page.add_init_script(
        "{ const real = AbortSignal.timeout; AbortSignal.timeout = (ms) => real.call(AbortSignal, ms / 10); }"
    )
    page.route("**/ui/v1/savings*", lambda route: None)
    page.goto(f"{fake.url}#savings")
    page.wait_for_selector(".toast:has-text('did not answer in time')")
    page.wait_for_selector("body[data-ready]")
    page.click("#views [data-view=references]")
    page.wait_for_selector("#shelf-note:has-text('No references yet.')")


def test_a_reference_that_is_added_by_two_clicks_is_added_once(fake, open_page):
    page = open_page(f"{fake.url}#references")
    sent = []
    catch_posts(page, "**/ui/v1/references", sent.append)
    page.click(".add-reference summary")
    page.set_input_files("#add-file", [{"name": "a.png", "mimeType": "image/png", "buffer": png()}])
    page.click(".add-reference .primary")
    until(page, lambda: sent)
    assert page.locator(".add-reference .primary").is_disabled()
    page.evaluate("document.querySelector('.add-reference form').requestSubmit()")
    sent[0].continue_()
    page.wait_for_selector(".reference")
    until(page, lambda: page.locator(".add-reference .primary").is_enabled())
    assert len(sent) == 1


def test_a_clip_is_fetched_only_when_it_is_downloaded(fake, open_page):
    page = open_page(fake.url)
    file = fake.library.files.add("local", b"text", "x.txt", handle="CLIP")
    about = {"id": file.id, "kind": "video", "handle": "CLIP", "filename": "a.mp4", "state": "ready"}
    about |= {"bytes": 4, "created_at": 1}
    page.route(
        f"**/ui/v1/files/{file.id}",
        lambda route: route.fulfill(content_type="application/json", body=json.dumps(about)),
    )
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    page.click("[aria-label='Open FILE#CLIP']")
    page.wait_for_selector("dialog:has-text('A clip.')")
    assert not [url for url in asked if url.endswith("/content")]
    with page.expect_download() as got:
        page.click("dialog button:text-is('Download')")
    assert got.value.suggested_filename == "a.mp4"


def test_a_link_of_a_model_is_shown_with_its_address(fake, open_page):
    fake.engine.answer = (
        "See [your bank](https://evil.example/login) and [https://a.example/](https://a.example/)."
    )
    page = open_page(fake.url)
    ask(page, "where?")
    assert page.locator(".text a").all_inner_texts() == [
        "your bank (https://evil.example/login)",
        "https://a.example/",
    ]


def test_an_upload_from_the_composer_of_a_phone_is_seen_and_heard(fake, open_page):
    page = open_page(fake.url, **PHONE)
    held = []
    catch_posts(page, "**/ui/v1/files", held.append)
    put(page, "photo.png")
    page.wait_for_selector("#composer .upload:has-text('photo.png')")
    page.wait_for_selector("#announcer:text-is('Adding photo.png.')", state="attached")
    until(page, lambda: held)
    held[0].continue_()
    page.wait_for_selector("#announcer:text-is('Added IMAGE#PHOTO.')", state="attached")
    assert page.locator(".upload").count() == 0
    page.click("#side-open")
    assert page.locator("#side #uploads").count() == 1


DROP = """(selector) => {
    const data = new DataTransfer();
    data.items.add(new File(['text'], 'a.txt', { type: 'text/plain' }));
    const event = (type) => new DragEvent(type, { dataTransfer: data, bubbles: true, cancelable: true });
    const place = document.querySelector(selector);
    return ['dragenter', 'dragover', 'drop'].map((type) => place.dispatchEvent(event(type))); }"""


def test_a_file_that_is_dropped_on_a_field_for_files_goes_into_the_field(fake, open_page):
    page = open_page(f"{fake.url}#references")
    page.click(".add-reference summary")
    assert page.evaluate(DROP, "#add-file") == [True, True, True]  # what the browser does is not prevented
    page.wait_for_timeout(100)
    assert page.locator(".upload").count() == 0 and not fake.library.files.page("local").files
    assert page.evaluate(DROP, "#main") == [True, False, False]
    page.wait_for_selector(HANDLE.format("A"))


def test_references_that_are_asked_for_again_and_again_are_said_once_and_keep_the_focus(fake, open_page):
    one = {"id": "ref_a", "kind": "text", "title": 'A "title"', "sha256": "0" * 64, "bytes": 4}
    answer = json.dumps({"data": [{**one, "state": "compiling"}], "has_more": False})
    asked = []

    def answered(route):
        asked.append(1)
        route.fulfill(content_type="application/json", body=answer)

    page = open_page(fake.url)
    page.clock.install()
    page.route("**/ui/v1/references*", answered)
    page.evaluate(
        """window.said = [];
        new MutationObserver((all) => all.forEach((one) => said.push(one.target.textContent)))
            .observe(document.body, { childList: true, subtree: true, characterData: true });"""
    )
    page.click("#views [data-view=references]")
    page.wait_for_selector(".reference")
    page.focus(".card-open")
    for n in (2, 3):
        page.clock.run_for(2_000)
        until(page, lambda n=n: len(asked) >= n)
    page.wait_for_timeout(100)
    said = page.evaluate("said.filter((text) => text === '1 reference, newest first').length")
    assert said == 1
    assert page.evaluate("document.activeElement.title") == 'Open A "title"'


def test_what_a_description_is_for_is_said(fake, open_page):
    page = open_page(f"{fake.url}#references")
    page.click(".add-reference summary")
    assert "searches look at the content only" in page.inner_text("#hint-description")


PASTE = """([words, page]) => {
    const data = new DataTransfer();
    if (words) data.setData('text/plain', words);
    if (page) data.setData('text/html', page);
    const bytes = Uint8Array.from(atob(document.body.dataset.png), (c) => c.charCodeAt(0));
    data.items.add(new File([bytes], 'image.png', { type: 'image/png' }));
    const event = new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true });
    return document.querySelector('#box').dispatchEvent(event);
}"""


def test_cells_of_a_spreadsheet_are_pasted_as_text_and_a_picture_is_uploaded(fake, open_page):
    page = open_page(fake.url)
    page.evaluate("(data) => { document.body.dataset.png = data; }", base64.b64encode(png()).decode())
    assert page.evaluate(PASTE, ["a\tb", "<table><tr><td>a</td><td>b</td></tr></table>"]), (
        "the text is pasted"
    )
    assert not page.evaluate(PASTE, ["", "<img src='x'>"]), "a picture that was copied in a browser"
    page.wait_for_selector(".file")
    assert len(fake.library.files.page("local").files) == 1


def test_what_was_deleted_a_moment_before_logging_out_is_gone(fake, open_page):
    key, _ = fake.keys.create("ann")
    fake.library.files.add("ann", b"Some notes.", "notes.txt", handle="NOTES")
    page = open_page(fake.url, ready=False, expected=("401",))
    log_in(page, key)
    page.click(f"{HANDLE.format('NOTES')} .icon-button")
    page.click(".menu-item:text-is('Delete')")
    page.wait_for_selector(".toast:has-text('was deleted')")
    log_out(page)
    until(page, lambda: not fake.library.files.page("ann").files)
