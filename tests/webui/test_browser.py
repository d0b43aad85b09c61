"""A person at the web interface, in a real browser, against a real server with the demo model."""

import re
import time

import httpx
from page_kit import BOX, PHONE, ask, more, reload, until, upload
from small_models import SMALL_SAMPLES

from mpic_lab.generator import references as generated

ON_SCREEN = "(e) => { const r = e.getBoundingClientRect(); return r.top >= 0 && r.bottom <= innerHeight; }"
QUESTION = "Which has more shapes, IMAGE#BEACH or IMAGE#GARDEN?"


def clear(url):
    """An empty library."""
    with httpx.Client(base_url=url, timeout=60) as http:
        for file in http.get("/v1/files").json()["data"]:
            http.delete(f"/v1/files/{file['id']}")


def test_a_first_time_user_gets_an_answer_and_compares_it_without_reading_beyond_the_first_screen(
    demo, open_page, figures
):
    """Clicks only on elements of the first screen. The seconds are printed, because they differ between machines."""
    url, started = demo
    clear(url)
    begun = time.monotonic()
    page = open_page(f"{url}/ui/")
    seconds = {"mpic serve listens": started, "page": time.monotonic() - begun}
    for name, click, shown in (
        ("answer", "[data-sample=two]", ".facts"),
        ("A/B answer", "[data-key=compare]", ".verdict"),
    ):
        assert page.locator(click).evaluate(ON_SCREEN)
        page.click(click)
        page.wait_for_selector(shown)
        seconds[name] = time.monotonic() - begun
    assert page.locator(".runs.two .text").count() == 2
    total = seconds["mpic serve listens"] + seconds["A/B answer"]
    parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    figures.append(f"first-time user: {total:.1f} s from `mpic serve` to the first A/B answer ({parts})")


def test_upload_two_images_ask_see_what_was_reused_compare_without_reuse(demo_url, open_page):
    clear(demo_url)
    page = open_page(f"{demo_url}/")  # the root leads to the interface
    assert page.url.rstrip("/").endswith("/ui") or "/ui#" in page.url or "/ui/#" in page.url
    assert "Nothing here yet" in page.inner_text("#library-note")
    upload(page, "beach.png", "garden.png")
    assert page.input_value(BOX).split() == ["IMAGE#BEACH", "IMAGE#GARDEN"]  # each upload names itself
    assert page.locator("#chips .chip img").count() == 2

    ask(page, QUESTION)
    assert page.inner_text(".answer .text").strip() == "4 and 3, so the first"
    assert page.evaluate("document.activeElement.id") == "box"  # the clicked sample is gone, and one types on
    line = page.inner_text(".facts")
    assert re.search(r"[\d.]+ m?s to the first token", line) and "% reused" in line
    assert not page.locator(".strip").count()  # the answer first; the strip on request
    page.click(".facts")
    assert page.locator(".strip .block.image img").count() == 2
    shown = dict(re.findall(r"([a-z ]+)\s+(\d+)", page.inner_text(".legend")))
    label = page.get_attribute(".strip", "aria-label")
    assert sum(map(int, shown.values())) == int(re.match(r"\d+", label)[0])
    assert int(shown["recomputed"]) == 32  # mpic-16 over two images
    assert page.locator(".waterfall .bar").all_inner_texts()[-1].startswith("first token")

    page.click("[data-key=compare]")
    page.wait_for_selector(".verdict")
    assert "Reuse did not change the answer." in page.inner_text(".verdict")
    assert re.search(r"[\d.]+× (sooner|later)", page.inner_text(".facts"))
    assert page.locator(".runs.two .strip").count() == page.locator(".runs.two .waterfall").count() == 2


def test_a_sample_question_adds_what_it_needs_and_its_names_fit_the_pictures(demo_url, open_page):
    clear(demo_url)
    page = open_page(f"{demo_url}/ui/", expected=("404",))
    said = page.inner_text("#welcome")
    assert "What this model knows" in said and "coloured shapes" in said and "never seen a photograph" in said
    assert "mpic serve --model" in said
    page.click("[data-sample=two]")
    page.wait_for_selector(".facts")
    assert page.inner_text(".answer .text").strip() == "blue star"
    handles = page.evaluate("[...document.querySelectorAll('.file')].map(e => e.dataset.handle).sort()")
    assert handles == ["SHAPES3", "SHAPES4"]
    page.click("#new-chat")
    ask(page, "Which has more shapes, IMAGE#SHAPES4 or IMAGE#SHAPES3?")
    page.wait_for_selector(".facts")
    assert page.inner_text(".answer .text").strip() == "4 and 3, so the first"  # as the names say
    ask(page, too_long := "what? " * 20_000)
    assert "context_length_exceeded" in page.inner_text(".error")
    assert page.input_value(BOX) == too_long  # to be mended, not to be typed again


def test_references_are_searched_and_cited_and_can_be_opened(demo_url, open_page):
    entries, queries = generated.load(generated.REFERENCES[1])
    fact = next(e for e in entries if e["id"] == "fact-061")
    question = next(q for q in queries if q["truth"] == fact["id"] and q["form"] == "question")
    with httpx.Client(base_url=demo_url, timeout=60) as http:
        data = {"id": "ref_fact", "title": fact["title"], "metadata": '{"shelf": "B 12"}'}
        made = http.post("/v1/references", data=data, files={"file": ("fact.txt", fact["text"].encode())})
        assert made.status_code == 200
        page = open_page(f"{demo_url}/ui/")
        try:
            page.click(".picker:has-text('No search')")
            page.get_by_role("option", name="Search when needed").click()
            ask(page, question["text"])
            assert page.inner_text(".answer .text").strip() == question["answer"]
            assert page.inner_text(".cited").strip() == fact["title"]
            page.click(".cited")
            page.wait_for_selector("dialog .chunk")
            opened = page.inner_text("dialog")
            assert fact["text"][:40] in opened and "B 12" in opened and "SHA-256" in opened
            page.keyboard.press("Escape")
            reload(page)
            assert "Search when needed" in page.inner_text("#tools")  # the choice is kept
        finally:
            http.delete("/v1/references/ref_fact")


def test_an_admin_adds_finds_and_removes_references(demo_url, open_page):
    page = open_page(f"{demo_url}/ui/#references")
    page.wait_for_selector("#shelf-note:has-text('No references yet.')")
    page.click(".add-reference summary")
    # nothing that looks like a text already there
    assert page.get_attribute("#add-title", "placeholder") is None
    for name in ("beach", "tower"):
        page.set_input_files("#add-file", SMALL_SAMPLES / f"{name}.png")
        page.fill("#add-title", f"The {name}")
        page.click(".add-reference .primary")
        page.wait_for_selector(f'.reference[data-state=ready]:has-text("The {name}")')
    page.set_input_files(".find [type=file]", SMALL_SAMPLES / "tower.png")
    page.wait_for_selector(".score")
    assert page.locator(".reference b").first.inner_text() == "The tower"
    assert page.locator(".query-picture").evaluate("e => e.naturalWidth") > 0  # the query is shown
    page.click("[aria-label='Search without the picture']")
    page.fill("#query", "a yellow circle")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=most like “a yellow circle”")
    page.click("text=Show all")
    for name in ("beach", "tower"):
        page.click(f'[aria-label="Remove The {name}"]')
        assert "shared by all users" in page.inner_text("dialog")
        page.click("dialog button:text-is('Cancel')")
        assert page.locator(f'.reference:has-text("The {name}")').count() == 1
        page.click(f'[aria-label="Remove The {name}"]')
        page.click("dialog .danger")
        page.wait_for_selector(f'.reference:has-text("The {name}")', state="detached")


def test_a_phone_shows_all_of_it_without_scrolling_sideways(demo_url, open_page):
    clear(demo_url)
    page = open_page(f"{demo_url}/ui/", **PHONE)
    fits = "document.documentElement.scrollWidth <= innerWidth"
    page.click("[data-sample=eight]")
    page.wait_for_selector(".facts")
    assert page.inner_text(".answer .text").strip() == "914"
    more(page, 1, "Answer again without reuse")
    page.wait_for_selector(".verdict")
    page.click(".facts")
    assert page.evaluate(fits)
    assert not page.locator("#library").is_visible()
    page.click("#side-open")
    assert page.locator("#library").is_visible()
    page.click("#views [data-view=policies]")
    page.wait_for_selector(".table")
    assert page.evaluate(fits) and not page.locator("#library").is_visible()
    page.locator(".plots img").first.scroll_into_view_if_needed()
    until(page, "document.querySelector('.plots img').naturalWidth > 0")


def test_the_savings_page_counts_what_was_not_computed(demo_url, open_page):
    clear(demo_url)
    with httpx.Client(base_url=demo_url, timeout=60) as http:
        file = {"file": ("idle.txt", b"nobody asks about this text")}
        assert (
            http.post("/v1/files", data={"purpose": "user_data", "handle": "IDLE"}, files=file).status_code
            == 200
        )
    page = open_page(f"{demo_url}/ui/")
    upload(page, "beach.png")
    ask(page, "IMAGE#BEACH In image BEACH, what do you see?")
    page.click("#views [data-view=savings]")
    page.wait_for_selector(".tile")
    saved, share = page.locator(".tile b").all_inner_texts()[:2]
    assert int(saved.replace(",", "")) >= 48 and share.endswith("%")
    assert "set a price" in page.inner_text("#money")
    page.fill("#price", "1000000")
    assert page.inner_text("#money") == f"${saved}.00"  # a dollar for each token
    assert page.locator(".unused li").all_inner_texts()[0].startswith("IDLE")
    page.select_option("#scope", "all")
    page.wait_for_selector("h3:has-text('Users')")
    assert "local" in page.inner_text("#savings .table >> nth=1")
    page.reload()
    page.wait_for_selector("#money")
    assert page.input_value("#price") == "1000000"
