"""Answers as the page shows them: their markup, their history, and what is compared with what."""

from page_kit import add, ask


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
