"""The bundled demo models' own convention, as their training data is spelled, comes out of ``build_prompt``."""

import pytest
from chat_models import DictResolver, image_chunk
from small_models import SMALL
from transformers import AutoProcessor, CLIPImageProcessor, LlavaProcessor

from mpic.prompt import ChatTemplate, ChunkSegment, TextSegment, build_prompt
from mpic_lab.generator import conversation as spelling
from mpic_lab.generator.tasks import EVAL_TASKS, Generator
from mpic_lab.generator.tokenizer import build_tokenizer


@pytest.fixture(scope="module", params=[*spelling.CHAT_TEMPLATES, "bundled"])
def labels(request):
    return request.param


@pytest.fixture(scope="module")
def template(labels):
    if labels == "bundled":
        return ChatTemplate(AutoProcessor.from_pretrained(SMALL))
    options = {"image_token": spelling.SPECIAL["image"], "chat_template": spelling.CHAT_TEMPLATES[labels]}
    return ChatTemplate(LlavaProcessor(CLIPImageProcessor(), build_tokenizer(), patch_size=8, **options))


class Resolver(DictResolver):
    def by_file_id(self, file_id):
        return image_chunk(file_id)


def ask(template, messages):
    names = ("EIFFEL2025", "LOUVRE2025")
    files = {"REPORT": " The job of Anna is baker."}
    return build_prompt(messages, template, Resolver(template.tokenize_document, names, files))


def test_abilities_of_the_templates(template):
    abilities = template.abilities
    assert abilities.documents and abilities.names and abilities.system and not abilities.tools
    assert (abilities.order, abilities.spaced) == ("word", (True, True))


@pytest.mark.parametrize("task", [task for task in EVAL_TASKS if not task.startswith("search")])
def test_prompts_are_spelled_as_in_training(template, labels, task):
    for seed in range(3):
        told = Generator(seed, "eval").task(task, 4)
        assert all(turn.query is None for turn in told.turns)  # the model writes searches itself
        messages = spelling.messages(told)
        for message in messages:
            for part in message["content"]:
                if isinstance(part, dict) and part["type"] == "image":
                    part["image"] = "file-x"
        *messages, answer = messages
        segments = ask(template, messages).segments
        expected = spelling.segments(told, "before" if labels == "before" else "around")
        assert expected.pop().content.startswith(f" {answer['content'][-1]['text']}")
        assert len(segments) == len(expected)
        for segment, wanted in zip(segments, expected):
            if wanted.kind == "image":
                assert isinstance(segment, ChunkSegment) and segment.chunk.kind == "image"
                continue
            ids = tuple(template.tokenizer(wanted.content, add_special_tokens=False)["input_ids"])
            found = segment.token_ids if isinstance(segment, TextSegment) else segment.chunk.token_ids
            assert found == ids


def test_handles_at_word_level(template, labels):
    text = "compare the tower in IMAGE#EIFFEL2025 with IMAGE#LOUVRE2025. In IMAGE#EIFFEL2025, what is FILE#REPORT?"
    built = ask(template, [{"role": "user", "content": text}])
    told = "".join(
        template.tokenizer.decode(s.token_ids) if isinstance(s, TextSegment) else f"@{s.chunk.label}"
        for s in built.segments
    )
    if labels == "before":
        assert told == (
            "<s> USER: compare the tower in image EIFFEL2025:@EIFFEL2025 with image LOUVRE2025:@LOUVRE2025 . "
            "In image EIFFEL2025, what is document REPORT:@REPORT ? ASSISTANT:"
        )
        return
    assert told == (
        "<s> USER: compare the tower in image EIFFEL2025:@EIFFEL2025 end of image EIFFEL2025. with image LOUVRE2025:"
        "@LOUVRE2025 end of image LOUVRE2025. . In image EIFFEL2025, what is document REPORT:@REPORT end of document "
        "REPORT. ? ASSISTANT:"
    )
