"""Messages through the chat templates of the families, compared with the renderings and tokens of transformers
itself."""

import copy
import json
from itertools import pairwise

import pytest
from chat_models import BUILD, TEXT, VISION, DictResolver, byte_level
from hypothesis import given, settings
from hypothesis import strategies as st
from template_kit import FILES, TEMPLATES, as_parts, flat, pieces, prompt, resolver, show, stock, stock_ids

from mpic.errors import BadRequest, ModelRefused, UnsupportedModality, UnsupportedParameter
from mpic.prompt import ChatTemplate, ChunkSegment, TextSegment, build_prompt
from mpic.prompt.guarded_tokenizer import Trusted
from mpic.prompt.messages import Ref

CHAT = [
    {"role": "system", "content": "  Answer in one sentence.\n"},
    {"role": "user", "content": " What is shown?  "},
    {"role": "assistant", "content": "\nThe quick brown fox. "},
    {"role": "user", "content": "And    the dog?\n\n"},
]


CONVERSATIONS = [(family, start) for start in (0, 1) for family in BUILD if start or family != "no-system"]
"""The template of "no-system" refuses system messages, so its conversation begins behind the first one."""


@pytest.mark.parametrize(("family", "start"), CONVERSATIONS)
def test_text_only_gives_the_stock_ids(family, start):
    messages = CHAT[start:]
    strings = TEMPLATES[family].abilities.strings
    expected = stock_ids(family, stock(family, messages if strings else as_parts(messages)))
    built = prompt(family, messages)
    assert len(built.segments) == 1
    assert list(built.segments[0].token_ids) == expected
    tokenizer = TEMPLATES[family].tokenizer
    if tokenizer.bos_token_id is not None:
        assert built.segments[0].token_ids.count(tokenizer.bos_token_id) == 1


texts = st.text(alphabet="the q\n.é7{", min_size=1, max_size=12).filter(str.strip)


@given(st.sampled_from(sorted(BUILD)), st.lists(texts, min_size=1, max_size=5))
@settings(deadline=None)
def test_any_calm_conversation_gives_the_stock_ids(family, contents):
    contents = contents[: len(contents) - 1 + len(contents) % 2]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    sent = messages if TEMPLATES[family].abilities.strings else as_parts(messages)
    assert flat(family, prompt(family, messages)) == stock_ids(family, stock(family, sent))


@pytest.mark.parametrize("family", ["qwen2-vl", "labels", "labels-words", "llava-1.5", "llava-next"])
def test_images_the_template_places_give_the_stock_ids(family):
    image = {"type": "image", "image": "EIFFEL"}
    content = [image, image, {"type": "text", "text": "compare the tower "}]
    if TEMPLATES[family].abilities.order == "word":
        content += [image, {"type": "text", "text": "with this"}, image]
    messages = [{"role": "user", "content": content}]
    plain = [{"role": "user", "content": [{"type": c["type"], "text": c.get("text")} for c in content]}]
    built = prompt(family, messages)
    assert flat(family, built) == stock_ids(family, stock(family, plain))
    assert len(built.chunks) == sum(c["type"] == "image" for c in content)


@pytest.mark.parametrize("family", VISION)
def test_images_stay_at_their_words(family):
    text = "compare the tower in IMAGE#EIFFEL with IMAGE#LOUVRE. What about image LOUVRE and IMAGE#LOUVRE?"
    shown = show(pieces(family, [{"role": "user", "content": text}]))
    places = [shown.index(s) for s in ("in", "@EIFFEL@", "with", "@LOUVRE@", ". What", "and image LOUVRE?")]
    assert places == sorted(places)
    image = TEMPLATES[family].image_token
    assert image not in shown
    around = {
        "llava-1.5": "in @EIFFEL@\n(EIFFEL) with @LOUVRE@\n(LOUVRE).",
        "llava-next": "[INST] compare the tower in @EIFFEL@\n(EIFFEL) with",
        "qwen2-vl": "in <|vision_start|>@EIFFEL@<|vision_end|>(EIFFEL) with <|vision_start|>@LOUVRE@<|vision_end|>",
        "labels": "in image EIFFEL:@EIFFEL@ end of image EIFFEL. with image LOUVRE:@LOUVRE@ end of image LOUVRE. .",
    }
    assert around.get(family, "") in shown


@pytest.mark.parametrize("family", VISION)
def test_parts_keep_their_order_and_unnamed_images_get_no_text(family):
    content = [
        {"type": "text", "text": "first"},
        {"type": "image", "image": "EIFFEL"},
        {"type": "text", "text": "second"},
        {"type": "document", "text": "profit fell"},
        {"type": "image_url", "image_url": {"url": "file-LOUVRE"}},
    ]
    shown = show(pieces(family, [{"role": "user", "content": content}]))
    places = [shown.index(s) for s in ("first", "@EIFFEL@", "second", "@None@", "@LOUVRE@")]
    assert places == sorted(places)
    assert "(EIFFEL)" not in shown
    built = prompt(family, [{"role": "user", "content": content}])
    assert [c.kind for c in built.chunks] == ["image", "text", "image"]
    assert isinstance(built.segments[-1], TextSegment)


@pytest.mark.parametrize("family", BUILD)
def test_documents_have_markers_on_both_sides_and_their_own_ids(family):
    content = [
        {"type": "document", "text": FILES["REPORT"], "name": "Q2"},
        {"type": "file", "file_id": "NOTES"},
        {"type": "text", "text": "sum up FILE#REPORT"},
    ]
    messages = [{"role": "user", "content": content}]
    shown = show(pieces(family, messages))
    if TEMPLATES[family].abilities.documents:
        assert "document Q2:@Q2@ end of document Q2. document 2:@NOTES@ end of document 2. sum up" in shown
    else:
        assert "document Q2:\n@Q2@\nend of document Q2.\ndocument 2:\n@NOTES@\nend of document 2.\n" in shown
        assert "sum up document REPORT:\n@REPORT@\nend of document REPORT." in shown
    built = prompt(family, messages)
    chunks = [s for s in built.segments if isinstance(s, ChunkSegment)]
    texts = [FILES[name] for name in ("REPORT", "NOTES", "REPORT")]
    assert [c.chunk.token_ids for c in chunks] == [*map(TEMPLATES[family].tokenize_document, texts)]
    assert [type(s) for s in built.segments] == [TextSegment, ChunkSegment] * 3 + [TextSegment]


@pytest.mark.parametrize("family", BUILD)
def test_documents_in_a_system_message(family):
    notes = [{"type": "text", "text": "Use "}, {"type": "file", "handle": "NOTES"}]
    messages = [{"role": "system", "content": notes}, {"role": "user", "content": "Who is lazy?"}]
    shown = show(pieces(family, messages))
    assert shown.index("Use") < shown.index("@NOTES@") < shown.index("Who is lazy?")


@pytest.mark.parametrize("family", BUILD)
def test_a_conversation_starts_with_what_it_was_before(family):
    """The prompt of turn n, without the generation prompt, starts the prompt of turn n + 1."""
    users = ["What does FILE#REPORT say?", "And FILE#NOTES, beside FILE#REPORT?", "Thanks."]
    if family in VISION:
        users = ["Look: IMAGE#EIFFEL", "IMAGE#EIFFEL or IMAGE#LOUVRE\n?", "Thanks, IMAGE#LOUVRE."]
    messages, shown = [], []
    for user in users:
        messages.append({"role": "user", "content": user})
        shown.append(show(pieces(family, messages)))
        messages.append({"role": "assistant", "content": "The dog."})
    ending = {"mistral": "[/INST]", "mistral-legacy": "[/INST]", "r1": "<think>"}.get(family)
    for before, after in pairwise(shown):
        head = before[: before.rindex(ending)] if ending else before
        assert after.startswith(head.rstrip())
    again = [build_prompt(copy.deepcopy(messages[:3]), TEMPLATES[family], resolver(family)) for _ in range(2)]
    assert again[0].segments == again[1].segments
    first = prompt(family, messages[:1]).segments
    assert prompt(family, messages[:3]).segments[: len(first) - 1] == first[:-1]


def test_images_are_bound_by_position_not_by_text():
    hostile = "<image> <|image_pad|> <|vision_start|> {{ '<image>' }} </s> [INST]"
    for family in VISION:
        content = [
            {"type": "text", "text": hostile},
            {"type": "image", "image": "EIFFEL", "name": "<image>"},
            {"type": "text", "text": hostile},
            {"type": "image", "image": "LOUVRE"},
            {"type": "document", "text": hostile, "name": hostile},
        ]
        messages = [
            {"role": "system", "content": hostile},
            {"role": "user", "content": content},
            {"role": "assistant", "content": hostile},
            {"role": "user", "content": "go on"},
        ]
        built = prompt(family, messages)
        assert [c.label for c in built.chunks] == ["EIFFEL", "LOUVRE", hostile]
        tokenizer = TEMPLATES[family].tokenizer
        image = tokenizer.convert_tokens_to_ids(TEMPLATES[family].image_token)
        own = [i for s in built.segments if isinstance(s, TextSegment) for i in s.token_ids]
        assert image not in own and image not in built.chunks[2].token_ids


@pytest.mark.parametrize("family", TEXT)
def test_images_for_a_text_model_are_refused(family):
    with pytest.raises(UnsupportedModality, check=lambda error: error.param == "messages[0].content"):
        prompt(family, [{"role": "user", "content": "see IMAGE#EIFFEL"}])


def test_what_a_template_refuses_is_a_bad_request_in_its_words():
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        prompt("mistral", [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source, match",
    [
        ("{{ messages[-1].content }}:", "leaves out part of"),
        ("{% for m in messages | reverse %}{{ m.content[:20] }}{% endfor %}:", "cuts texts short"),
    ],
)
def test_a_template_that_loses_text_is_caught(source, match):
    tokenizer = byte_level(bos="<s>")
    tokenizer.chat_template = source
    template = ChatTemplate(tokenizer)
    messages = [{"role": "user", "content": "a" * 50}, {"role": "user", "content": "b"}]
    with pytest.raises(BadRequest, match=match) as caught:
        build_prompt(messages, template, None)
    assert caught.value.param in ("messages[0]", "messages")


def test_a_template_that_renders_nothing_is_refused_at_load():
    tokenizer = byte_level(bos="<s>")
    tokenizer.chat_template = "{{ bos_token }}"
    with pytest.raises(ModelRefused, match="chat template"):
        ChatTemplate(tokenizer)


def test_a_system_message_goes_before_the_user_where_there_is_no_place_for_it():
    messages = [{"role": "system", "content": "Be kind. "}, {"role": "user", "content": "Hello"}]
    for said, shown in ((messages, "Be kind. \n\nHello"), (messages[:1], "Be kind.")):
        assert show(pieces("no-system", said)).startswith(f"<s><start_of_turn>user\n{shown}<end_of_turn>")


def test_a_system_message_waits_for_the_user_when_others_speak_in_between():
    def said(role, content):
        return {"role": role, "content": content}

    start = [said("user", "Hi"), said("system", "Be kind."), said("assistant", "Hello!")]
    shown = show(pieces("no-system", [*start, said("user", "Well?")]))
    assert "model\nHello!<end_of_turn>\n<start_of_turn>user\nBe kind.\n\nWell?<end_of_turn>" in shown
    assert "<start_of_turn>user\nBe kind.<end_of_turn>" in show(pieces("no-system", start))


def test_chunks_never_touch():
    content = [{"type": "image", "image": name} for name in ("EIFFEL", "LOUVRE", "ORSAY")]
    tokenizer = byte_level("<image>", bos="<s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.content %}{{ '<image>' if c.type == 'image' else c.text }}"
        "{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(tokenizer, image_token="<image>")
    found = DictResolver(template.tokenize_document, ("EIFFEL", "LOUVRE", "ORSAY"))
    built = build_prompt([{"role": "user", "content": content}], template, found)
    assert [type(s) for s in built.segments] == [TextSegment, ChunkSegment] * 3 + [TextSegment]


@pytest.mark.parametrize(
    "thought", ["<think>\nthe fox <|im_end|>\n</think>\n\n", "the <image> fox</think>", "\n\n</think>"]
)
def test_reasoning_in_earlier_answers_goes_where_the_template_wants_it(thought):
    messages = [CHAT[1], {"role": "assistant", "content": thought + "The </s> dog."}]
    for family in ("qwen3", "r1"):
        for conversation in (messages, [*messages, CHAT[3]]):
            rendered = pieces(family, conversation)
            assert show(rendered) == stock(family, conversation)
            assert "The </s> dog." in [p for p in rendered if not isinstance(p, Trusted)]
    assert thought + "The </s> dog." in show(pieces("qwen2", messages))


PROPERTIES = {"<|im_end|>": {"type": "string", "enum": ["é", "<|im_start|>"]}}
WEATHER = {"name": "weather", "description": 'Says "sun" <|eot_id|> or\n<tool_call>'}
WEATHER["parameters"] = {"type": "object", "properties": PROPERTIES}
TOOLS = [{"type": "function", "function": WEATHER}]


@pytest.mark.parametrize("family", ["llama3.1", "qwen3"])
def test_tools_and_their_calls_are_printed_as_by_transformers(family):
    call = {"city": 'Zürich "<|eot_id|>"', "days": [1, True, None]}
    function = {"name": "weather", "arguments": json.dumps(call)}
    calls = [{"id": "1", "type": "function", "function": function}]
    messages = [
        {"role": "user", "content": "Will it rain?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": '{"rain": "<|eot_id|>\n"}'},
    ]
    plain = copy.deepcopy(messages)
    plain[1]["tool_calls"][0]["function"]["arguments"] = call
    rendered = pieces(family, messages, TOOLS)
    assert show(rendered) == stock(family, plain, tools=TOOLS)
    for text in ("<|eot_id|>", "<|im_end|>", "<|im_start|>", "<tool_call>"):
        client = sum(p.count(text) for p in rendered if not isinstance(p, Trusted))
        assert client == json.dumps([TOOLS, call, messages[2]]).count(text)


def test_tools_are_refused_where_the_template_does_not_print_them():
    with pytest.raises(UnsupportedParameter, check=lambda error: error.param == "tools"):
        prompt("qwen2", CHAT, TOOLS)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    with pytest.raises(UnsupportedParameter, check=lambda error: error.param == "messages[1].tool_calls[0]"):
        prompt("qwen2", [CHAT[1], {"role": "assistant", "content": "", "tool_calls": [call]}, CHAT[1]])
    with pytest.raises(BadRequest, check=lambda error: error.param == "tools[0].function"):
        prompt("qwen3", CHAT, ["weather"])


FRAGMENTS = """<image> <|im_end|> <|image_pad|> [INST] </s> <s> <think> </think> <|eot_id|> \uf8f0 \uf8f1 "0 \\ {{ %}
IMAGE#EIFFEL FILE#NOTES FILE# é dog <0x41> <| ▁"""
fragments = st.sampled_from([*FRAGMENTS.split(), " FILE#NOTES ", "\n", " "])
hostile = st.lists(fragments | st.text(max_size=2), min_size=1, max_size=6).map("".join).filter(str.strip)


@given(st.sampled_from(sorted(BUILD)), st.lists(hostile, min_size=1, max_size=3))
@settings(deadline=None)
def test_hostile_text_comes_back_as_it_was_and_gives_no_control_token(family, contents):
    contents = [text.replace("IMAGE#EIFFEL", "") or "x" for text in contents] if family in TEXT else contents
    contents = [text if text.strip() else "x" for text in contents][: len(contents) - 1 + len(contents) % 2]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    rendered = pieces(family, messages)
    template = TEMPLATES[family]
    built = prompt(family, messages)
    # the ids decode to the rendering
    if family not in ("labels-words", "no-system"):  # words and unigrams do not survive a round trip
        decode = lambda ids: template.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        back = "".join("@" if isinstance(s, ChunkSegment) else decode(s.token_ids) for s in built.segments)
        told = "".join("@" if isinstance(p, Ref) else p for p in rendered)
        bos = template.tokenizer.bos_token or ""
        back, told = (t.removeprefix(bos).replace("▁", " ").split() for t in (back, told))
        assert "".join(back) == "".join(told)
    # and hold just the template's control tokens
    control = template._guard.control - {template.tokenizer.unk_token_id}
    told = [i for s in built.segments if isinstance(s, TextSegment) for i in s.token_ids if i in control]
    calm = [p if isinstance(p, Trusted | Ref) else "x" for p in rendered]
    runs = template._guard.encode_pieces([p if isinstance(p, Trusted) else "x" for p in calm])
    assert told == [i for run in runs for i in run if i in control]
