"""Text that a processor, not the chat template, puts around an image."""

from __future__ import annotations

import pytest
from chat_models import DictResolver, processor
from server_helpers import gemma3_processor

from mpic.prompt import ChatTemplate, build_prompt
from mpic.prompt.markers import image_markers
from mpic.prompt.segments import TextSegment


def test_the_markers_are_what_the_processor_replaces_its_image_token_by():
    assert image_markers(gemma3_processor()) == ("\n\n<start_of_image>", "<end_of_image>\n\n")


@pytest.mark.parametrize("family", ["llava-1.5", "qwen2-vl", "llama3"])
def test_there_are_none_where_the_template_prints_all_of_them_or_there_are_no_images(family):
    assert image_markers(processor(family)) == ("", "")


def test_a_prompt_has_the_ids_of_the_stock_processor_also_between_images_that_touch():
    stock = gemma3_processor()
    template = ChatTemplate(stock)
    resolver = DictResolver(template.tokenize_document, ("EIFFEL", "LOUVRE"))
    parts = [{"type": "image", "file_id": f"file-{name}"} for name in ("EIFFEL", "LOUVRE")]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "differ in"}]}]
    soft = stock.tokenizer.image_token_id
    made = build_prompt(messages, template, resolver)
    ids: list[int] = []
    for segment in made.segments:
        ids += segment.token_ids if isinstance(segment, TextSegment) else [soft] * 16
    texts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "differ in"}]
    rendered = stock.apply_chat_template([{"role": "user", "content": texts}], add_generation_prompt=True)
    expanded = rendered.replace("<start_of_image>", stock.full_image_sequence)
    assert ids == stock.tokenizer(expanded, add_special_tokens=False)["input_ids"]
