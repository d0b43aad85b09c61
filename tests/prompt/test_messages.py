"""Parsing and validation of OpenAI-shaped messages, and the handles in their texts."""

import base64
import re
import unicodedata
from itertools import product

import pytest
from chat_models import DictResolver
from hypothesis import given
from hypothesis import strategies as st

from mpic.errors import (
    BadRequest,
    CorruptFile,
    EmptyPrompt,
    FileNotFound,
    InvalidImage,
    InvalidUpload,
    MPICError,
    UnknownHandle,
)
from mpic.handles import canonical, folded
from mpic.prompt import messages as parser
from mpic.prompt.messages import NOTED, Handles, Ref, Text, find_handles, parse_messages

PNG = "data:image/png;base64," + base64.b64encode(b"\x89PNG and so on").decode()
USER, ASSISTANT = {"role": "user", "content": "x"}, {"role": "assistant"}


def resolver() -> DictResolver:
    names = ("EIFFEL2025", "LOUVRE2025", "v1.2", "V.", "a-b", "图片")
    files = dict.fromkeys(("REPORT", "notes.txt", "ОТЧЁТ", "हिन्दी"), "profit rose")
    return DictResolver(lambda text: tuple(text.encode()), names, files)


def content(value, role="user", found=None):
    """Return the content of a single message, with texts as strings and chunks as ``@name``."""
    (message,) = parse_messages([{"role": role, "content": value}], found or resolver())
    return [
        item.text if isinstance(item, Text) else f"@{item.name or item.chunk.label}"
        for item in message.content
    ]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("in IMAGE#EIFFEL2025 with IMAGE#LOUVRE2025.", ["in ", "@EIFFEL2025", " with ", "@LOUVRE2025", "."]),
        ("IMAGE#EIFFEL2025IMAGE#LOUVRE2025", "same"),
        ("IMAGE#LOUVRE2025IMAGE#EIFFEL2025 FILE#REPORTS", "same"),
        ("(IMAGE#EIFFEL2025)'s", ["(", "@EIFFEL2025", ")'s"]),
        ("IMAGE#v1.2... FILE#notes.txt, FILE#REPORT-", ["@v1.2", "... ", "@notes.txt", ", ", "@REPORT", "-"]),
        ("see IMAGE#V.. or IMAGE#V.", ["see ", "@V.", ". or image V."]),
        ("IMAGE#a-b--- FILE#EIFFEL2025", ["@a-b", "--- ", "@EIFFEL2025"]),
        ("IMAGE# FILE#. IMAGE#-. image#x MYIMAGE#x IMAGE##x", "same"),
        ("FILE#REPORT says; in FILE#REPORT, so", ["@REPORT", " says; in document REPORT, so"]),
        ("é IMAGE#EIFFEL2025, é", ["é ", "@EIFFEL2025", ", é"]),
        ("IMAGE#EIFFEL2025é IMAGE#EIFFEL2025\u0301", "same"),
        ("看IMAGE#EIFFEL2025里有什么？", ["看", "@EIFFEL2025", "里有什么？"]),
        ("IMAGE#图片 里有什么, FILE#ОТЧЁТ? image 图片", ["@图片", " 里有什么, ", "@ОТЧЁТ", "? image 图片"]),
        ("IMAGE#图片集 IMAGE#图 IMAGE#图片里 FILE#ОТЧЁТЫ FILE#ОТЧЕТ", "same"),
        ("FILE#हिन्दी, FILE#हिन्द", ["@हिन्दी", ", FILE#हिन्द"]),
        (r"IMAGE\#EIFFEL2025 FILE\#REPORT. IMAGE\#NOBODY", ["IMAGE#EIFFEL2025 FILE#REPORT. IMAGE#NOBODY"]),
        (r"IMAGE\\#EIFFEL2025 IMAGE#EIFFEL2025", [r"IMAGE\#EIFFEL2025 ", "@EIFFEL2025"]),
        (r"MYIMAGE\#x IMAGE\# IMAGE\ #x \#x", "same"),
        ("ask about IMAGE#NOBODY. `FILE#x` https://x.example/page#FILE#x IMAGE#REPORT", "same"),
    ],
)
def test_handles_in_text(text, expected):
    assert content(text) == ([text] if expected == "same" else expected)


@pytest.mark.parametrize("text", [r"IMAGE#EIFFEL2025 FILE#REPORT IMAGE\#V. IMAGE#NOBODY"])
def test_with_handles_off_every_text_is_as_it_was_sent(text):
    found, handles = resolver(), Handles(on=False)
    parts = [{"type": "text", "text": text}, {"type": "image", "handle": "EIFFEL2025"}]
    [message] = parse_messages([{"role": "user", "content": parts}], found, handles=handles)
    assert message.content[0] == Text(text) and isinstance(message.content[1], Ref)
    assert found.asked == [("image", "EIFFEL2025")] and handles.unlinked == {}


def test_text_of_anyone_but_users_links_nothing():
    for role in ("system", "developer", "assistant", "tool"):
        found, handles = resolver(), Handles()
        message = {"role": role, "content": "IMAGE#EIFFEL2025 and FILE#REPORT"}
        messages = parse_messages([USER, message, USER], found, handles=handles)
        assert messages[1].content == (Text("IMAGE#EIFFEL2025 and FILE#REPORT"),) and found.asked == []
        assert len(handles.unlinked) == (2 if role in ("system", "developer") else 0)


def test_what_stayed_text_is_noted_with_its_reason():
    handles = Handles()
    first = r"IMAGE#NOBODY. IMAGE#NOBODY FILE#nobody, IMAGE#REPORT IMAGE\#QUOTED FILE#REPORT IMAGE# FILE#..."
    second = f"IMAGE#EIFFEL2025 IMAGE#{'x' * 65}"
    conversation = [{"role": "user", "content": text} for text in (first, second)]
    parse_messages(conversation, resolver(), handles=handles)
    assert [*handles.unlinked] == ["IMAGE#NOBODY", "FILE#nobody", "IMAGE#REPORT", f"IMAGE#{'x' * 64}..."]
    assert "not in your library" in handles.unlinked["IMAGE#NOBODY"]
    assert "at most 64" in handles.unlinked[f"IMAGE#{'x' * 64}..."]
    many = " ".join(f"FILE#A{i}" for i in range(NOTED + 9))
    parse_messages([{"role": "user", "content": many}], resolver(), handles=handles)
    assert len(handles.unlinked) == NOTED


@pytest.mark.parametrize("name", ["図", "É", "ΟΔΌΣ", "ЁЛКА", "ა", "ภาพ", "STRASSE", "한글"])
def test_a_name_is_found_however_it_is_spelt(name):
    assert canonical(name) == name
    for form in ("NFC", "NFD", "NFKC"):
        for spelt in (name, name.lower(), name.casefold(), name.upper()):
            written = unicodedata.normalize(form, spelt)
            assert folded(written) == folded(name)
            (mention,) = find_handles(f"see IMAGE#{written}, so")
            assert mention.written == written


def test_first_mention_links_and_later_ones_refer_back_over_the_whole_conversation():
    found = resolver()
    conversation = [
        {"role": "user", "content": "Use FILE#REPORT."},
        {"role": "user", "content": [{"type": "text", "text": "What is in IMAGE#EIFFEL2025?"}]},
        {"role": "assistant", "content": "IMAGE#EIFFEL2025 is a tower, IMAGE#NOBODY too"},
        {"role": "user", "content": "And FILE#REPORT? Is IMAGE#EIFFEL2025 tall? IMAGE#LOUVRE2025"},
    ]
    messages = parse_messages(conversation, found)
    types = [[type(item) for item in message.content] for message in messages]
    assert types == [[Text, Ref, Text], [Text, Ref, Text], [Text], [Text, Ref]]
    assert messages[3].content[0].text == "And document REPORT? Is image EIFFEL2025 tall? "
    assert messages[2].content[0].text.startswith("IMAGE#EIFFEL2025 is")
    assert [name for _, name in found.asked].count("REPORT") == 1


def test_a_handle_part_counts_as_the_first_mention():
    part = {"type": "file", "file": {"handle": "REPORT"}}
    text = {"type": "text", "text": "sum up FILE#REPORT"}
    assert content([part, text]) == ["@REPORT", "sum up document REPORT"]


def test_a_handle_in_another_case_is_the_same_and_is_linked_once():
    class AnyCase(DictResolver):
        """A resolver that looks up handles like the library."""

        def by_handle(self, kind, name):
            return super().by_handle(kind, name.upper())

    found = AnyCase(lambda text: tuple(text.encode()), ("EIFFEL",), {"REPORT": "profit rose"})
    parts = [
        {"type": "text", "text": "IMAGE#Eiffel, so IMAGE#eiffel."},
        {"type": "file", "handle": "report"},
        {"type": "text", "text": "FILE#REPORT"},
    ]
    assert content(parts, found=found) == ["@Eiffel", ", so image Eiffel.", "@report", "document report"]


def test_any_error_of_a_mention_names_the_field():
    class Damaged(DictResolver):
        def by_handle(self, kind, name):
            raise CorruptFile(f"the original of {name} is damaged")

    with pytest.raises(CorruptFile, check=lambda error: error.param == "messages[0].content"):
        content("see IMAGE#EIFFEL", found=Damaged(lambda text: ()))


@pytest.mark.parametrize("handle", ["NOBODY", "NOBODY.", "x" * 65, "x" * 64 + ".-", "图" * 300, "é." * 40])
def test_an_unknown_handle_stays_text_unless_a_part_names_it(handle):
    assert content(f"see IMAGE#{handle}") == [f"see IMAGE#{handle}"]
    with pytest.raises(UnknownHandle) as caught:
        content([{"type": "text", "text": "hm"}, {"type": "image", "handle": handle}])
    assert (caught.value.param, caught.value.status) == ("messages[0].content[1].handle", 404)


@pytest.mark.parametrize(
    "part, label",
    [
        ({"type": "image_url", "image_url": {"url": "file-EIFFEL2025", "detail": "high"}}, "EIFFEL2025"),
        ({"type": "image_url", "image_url": "EIFFEL2025"}, "EIFFEL2025"),
        ({"type": "image", "image": "file-EIFFEL2025"}, "EIFFEL2025"),
        ({"type": "image", "handle": "EIFFEL2025"}, "EIFFEL2025"),
        ({"type": "image", "file_id": "EIFFEL2025"}, "EIFFEL2025"),
        ({"type": "file", "file_id": "file-REPORT"}, "REPORT"),
        ({"type": "file", "file": {"file_id": "file-EIFFEL2025"}, "name": "TOWER"}, "TOWER"),
        ({"type": "file", "handle": "REPORT"}, "REPORT"),
        ({"type": "cache", "cache_id": "cache-REPORT"}, "REPORT"),
        ({"type": "document", "text": "profit fell", "name": "Q2"}, "Q2"),
        ({"type": "document", "text": "IMAGE#EIFFEL2025", "name": "raw"}, "raw"),
    ],
)
def test_parts(part, label):
    assert content([part, {"type": "text", "text": "?"}]) == [f"@{label}", "?"]


def test_a_cache_is_all_its_chunks_in_order():
    found = resolver()
    chunks = found.by_cache_id("group-all")
    for part, names in (
        ({"cache_id": "group-all"}, [None] * len(chunks)),
        ({"cache": {"cache_id": "group-all"}, "name": "BOOK"}, [f"BOOK {i + 1}" for i in range(len(chunks))]),
    ):
        (message,) = parse_messages([{"role": "user", "content": [{"type": "cache", **part}]}], found)
        assert [(r.chunk, r.name) for r in message.content] == list(zip(chunks, names, strict=True))


def test_data_urls_are_decoded_and_never_fetched():
    image = {"type": "image_url", "image_url": {"url": PNG}}
    (message,) = parse_messages([{"role": "user", "content": [image]}], resolver())
    assert message.content[0].chunk.kind == "image"


@pytest.mark.parametrize(
    "part, error, param",
    [
        ({"type": "video"}, BadRequest, "content[1].type"),
        ({"text": "no type"}, BadRequest, "content[1].type"),
        ({"type": ["text"]}, BadRequest, "content[1].type"),
        ("text", BadRequest, "content[1]"),
        ({"type": "text"}, BadRequest, "content[1].text"),
        ({"type": "text", "text": 3}, BadRequest, "content[1].text"),
        ({"type": "document", "text": ""}, BadRequest, "content[1].text"),
        ({"type": "document", "text": "x", "name": 3}, BadRequest, "content[1].name"),
        ({"type": "cache"}, BadRequest, "content[1].cache_id"),
        ({"type": "cache", "cache_id": "none"}, FileNotFound, "content[1].cache_id"),
        ({"type": "file", "file": {"file_id": "none"}}, FileNotFound, "content[1].file.file_id"),
        ({"type": "file", "file": {"file_data": "eA=="}}, InvalidUpload, "content[1].file.file_data"),
        (
            {"type": "file", "file": {"file_data": "data:;base64,?"}},
            InvalidUpload,
            "content[1].file.file_data",
        ),
        (
            {"type": "file", "file": {"file_data": "data:;base64,", "file_id": "x"}},
            BadRequest,
            "content[1].file.file_data",
        ),
        ({"type": "file", "file": {"filename": "x"}}, BadRequest, "content[1].file"),
        ({"type": "file", "file": {"handle": "none"}}, UnknownHandle, "content[1].file.handle"),
        ({"type": "image_url", "image_url": {}}, BadRequest, "image_url.file_id"),
        *(
            ({"type": "image_url", "image_url": {"url": url}}, BadRequest, "content[1].image_url.url")
            for url in ("http://x/y.png", "https://x/y.png", "file:///etc/passwd", "//host/x.png")
        ),
        *(
            ({"type": "image_url", "image_url": {"url": f"data:{url}"}}, InvalidImage, "image_url.url")
            for url in (
                "text/html;base64,eA==",
                "image/png;base64,?",
                "image/png,raw",
                "image/png;base64,eA==",
            )
        ),
    ],
)
def test_bad_parts_name_their_field(part, error, param):
    with pytest.raises(error) as caught:
        content([{"type": "text", "text": "hello"}, part])
    assert caught.value.param.startswith("messages[0].content[1]")
    assert caught.value.param.endswith(param)
    assert "http" not in str(part) or "upload" in caught.value.message


@pytest.mark.parametrize(
    "messages, error, param",
    [
        ([], EmptyPrompt, "messages"),
        (None, BadRequest, "messages"),
        ("hello", BadRequest, "messages"),
        ({"role": "user"}, BadRequest, "messages"),
        (["hello"], BadRequest, "messages[0]"),
        ([{"content": "x"}], BadRequest, "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], BadRequest, "messages[0].role"),
        ([{"role": "user"}], EmptyPrompt, "messages[0].content"),
        ([{"role": "user", "content": " \n"}], EmptyPrompt, "messages[0].content"),
        ([{"role": "user", "content": []}], EmptyPrompt, "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": ""}]}], EmptyPrompt, "messages[0].content"),
        ([{"role": "system", "content": ""}], EmptyPrompt, "messages[0].content"),
        ([{"role": "system"}, USER], BadRequest, "messages[0].content"),
        ([USER, {"role": "tool"}], BadRequest, "messages[1].content"),
        ([{"role": "user", "content": 3}], BadRequest, "messages[0].content"),
        ([{"role": "user", "content": "x", "colour": "red"}], BadRequest, "messages[0].colour"),
        ([{"role": "user", "content": "x", "name": 3}], BadRequest, "messages[0].name"),
        ([{**ASSISTANT, "tool_calls": [{"id": "1"}]}], BadRequest, "messages[0].tool_calls[0].function"),
        ([{**ASSISTANT, "content": [{"type": "image"}]}], BadRequest, "messages[0].content[0].type"),
    ],
)
def test_bad_messages_name_their_field(messages, error, param):
    with pytest.raises(error) as caught:
        parse_messages(messages, resolver())
    assert caught.value.param == param
    assert caught.value.status == 400


def test_an_answer_sent_back_with_all_its_nulls_is_accepted():
    nulls = dict.fromkeys(("content", "refusal", "audio", "tool_calls"))
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answers = [{**ASSISTANT, **nulls, "annotations": []}, {**ASSISTANT, "content": "", "tool_calls": [call]}]
    first, second = parse_messages(answers, resolver())
    assert first.content == () and first.fields == {}
    assert second.fields["tool_calls"][0]["function"]["arguments"] == {"a": 1}


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
value_like = json_like | st.sampled_from(["REPORT", "data:image/png;base64,x", "http://x"])
KINDS = ("text", "image_url", "image", "file", "document", "cache")
part_like = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS) | json_like},
    optional=dict.fromkeys((*KINDS, "url", "file_id", "handle", "name", "cache_id"), value_like),
)
content_like = json_like | st.lists(part_like, max_size=3)
message_like = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | json_like},
    optional={"content": content_like, "tool_calls": json_like, "name": json_like},
)


@given(json_like | st.lists(message_like, max_size=3))
def test_any_messages_parse_or_raise_an_error_of_the_tree(messages):
    try:
        parsed = parse_messages(messages, resolver())
    except MPICError as error:
        assert error.status < 500 and error.param
    else:
        assert len(parsed) == len(messages)


AROUND = ["IMAGE#V.", "IMAGE#a-b", "FILE#REPORT", "IMAGE#", " ", ".", "-", "é", "#"]


@given(st.lists(st.sampled_from(AROUND), min_size=1))
def test_text_around_handles_is_kept_to_the_letter(pieces):
    text = "".join(pieces)
    try:
        items = content(text)
    except EmptyPrompt:
        return
    back = "".join(i if not i.startswith("@") else i[1:] for i in items)
    for linked in ("image V.", "image a-b", "document REPORT"):
        back = back.replace(linked, linked.split()[1])
    bare = lambda text: re.sub("(IMAGE|FILE)#", "", text)  # those that linked have lost it
    assert bare(back) == bare(text)


def test_a_reference_is_itself_and_nothing_else():
    messages = [{"role": "user", "content": "IMAGE#V."}]
    first, second = (parse_messages(messages, resolver())[0].content[0] for _ in "ab")
    assert isinstance(first, Ref) and first != second and first.chunk == second.chunk


@pytest.mark.parametrize(
    ("text", "name", "lengths"),
    [("IMAGE#" + "x" * 62 + "....", "", [64, 63, 62]), ("IMAGE#A" + "." * 1_000_000, "A", range(64, 0, -1))],
)
def test_a_handle_is_looked_up_by_names_of_at_most_64_characters(text, name, lengths):
    found = DictResolver(lambda text: tuple(text.encode()), ("A",), {})
    assert ("@A" in content(text, found=found)) == bool(name)
    assert [asked for _, asked in found.asked] == [text.removeprefix("IMAGE#")[:n] for n in lengths]


@pytest.mark.parametrize("name", ["A" + "." * 63, "A.", "A.-."])
def test_mentions_of_one_name_cost_no_more_look_ups_the_more_there_are(name):
    asked = []
    for times in (1, 200):
        found = DictResolver(lambda text: tuple(text.encode()), ("A",), {})
        parts = [{"type": "text", "text": f"IMAGE#{name} " * times}] * 2
        assert content(parts, found=found)[0] == f"@{name.rstrip('.-')}"
        asked.append(found.asked)
    assert asked[0] == asked[1] and len(asked[0]) == len(name)


def test_a_name_that_does_not_exist_as_one_kind_is_looked_up_as_the_other():
    found = DictResolver(lambda text: tuple(text.encode()), ("A",), {"A.": "profit rose"})
    assert content("IMAGE#A. FILE#A.", found=found) == ["@A", ". ", "@A."]


def test_look_ups_are_bounded_although_every_mention_ends_in_another_way(monkeypatch):
    monkeypatch.setattr(parser, "MAX_UNKNOWN", 100)
    found = DictResolver(lambda text: tuple(text.encode()), ("A",), {})
    ends = ("".join(end) for end in product(".-", repeat=10))
    with pytest.raises(BadRequest, match="100 names that do not exist") as caught:
        content(" ".join(f"IMAGE#A{end}" for end in ends), found=found)
    assert caught.value.param == "messages[0].content"
    assert len(found.asked) == 102  # with the one that exists and the one that is too many


ODD = ["IMAGE#", "FILE#", "IMAGE", "\\", "图", "#", "aIMAGE#b", "_FILE#c", "A.-", "é", " ", "\n", "9", "FIL"]


@given(st.lists(st.sampled_from(ODD)))
def test_handles_are_found_as_by_searching_all_of_the_text(pieces):
    text = "".join(pieces)
    handle = re.compile(r"(?<![A-Za-z0-9_])(IMAGE|FILE)(\\*)#([\w.\-]+)")
    found = [(m.start(), m.end(), m[1].lower(), len(m[2]), m[3]) for m in handle.finditer(text)]
    assert [mention[:5] for mention in find_handles(text)] == found
