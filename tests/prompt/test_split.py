"""KVSplit: joined pieces equal the text, each fits, and each ends where the mode says."""

import functools
import itertools
import os
import re
import subprocess
import sys
import threading

import pytest
from chat_models import byte_level, metaspace, unigram
from hostile_texts import TEXTS, demo, prose, recorded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from semantic_text_splitter import MarkdownSplitter, TextSplitter

from mpic import cancel
from mpic.errors import BadRequest
from mpic.prompt import ChatTemplate
from mpic.prompt.split import MODES, Split, SplitPiece, TooManyPieces, _tidy, split_text

TOKENIZERS = {"byte": byte_level, "metaspace": metaspace, "unigram": unigram}
WORDS = ["a", "river.", "Über", "das", "東京は", "🙂", "no!", "#", "##", "e\u0301"]
WORDS += ["\n", "\n\n", " ", "  ", "\t", "\r\n"]
TEXT = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=40).map(" ".join)


@functools.cache
def template(name):
    return ChatTemplate(demo(), "<image>") if name == "demo" else ChatTemplate(TOKENIZERS[name]())


def spans_of_words(text):
    """Return spans with one token per word, including white space before it."""
    out, at = [], 0
    for word in text.split():
        start = text.index(word, at)
        out.append((start, at := start + len(word)))
    return out


@settings(max_examples=150, deadline=None, database=None)
@given(TEXT, st.sampled_from(MODES), st.integers(1, 12), st.sampled_from([*TOKENIZERS]))
def test_joined_pieces_are_the_text(text, mode, tokens, name):
    pieces = split_text(text, Split(mode, tokens), template(name).documents.spans)
    assert "".join(text[p.start : p.end] for p in pieces) == text
    if text.strip():
        assert all(text[p.start : p.end].strip() for p in pieces)


@settings(max_examples=150, deadline=None, database=None)
@given(TEXT.filter(str.strip), st.sampled_from(MODES[1:]), st.integers(2, 12), st.integers(1, 11))
def test_overlapping_pieces_cover_the_text_and_move_on(text, mode, tokens, overlap):
    split = Split(mode, tokens, min(overlap, tokens // 2))
    pieces = split_text(text, split, template("byte").documents.spans)
    assert pieces[0].start == 0 and pieces[-1].end == len(text)
    for before, after in itertools.pairwise(pieces):
        assert before.start < after.start <= before.end < after.end


def test_fixed_pieces_have_the_tokens_asked_for():
    text = " ".join(f"w{i}" for i in range(10))
    pieces = split_text(text, Split("fixed", 4), spans_of_words)
    assert [len(text[p.start : p.end].split()) for p in pieces] == [4, 4, 2]
    shared = split_text(text, Split("fixed", 4, 1), spans_of_words)
    assert [text[p.start : p.end].split()[0] for p in shared] == ["w0", "w3", "w6"]
    assert [text[p.start : p.end].split()[-1] for p in shared] == ["w3", "w6", "w9"]


def test_a_character_of_many_tokens_is_not_cut():
    text = "🙂🙂🙂"
    spans = template("byte").documents.spans
    assert len(list(spans(text))) == 12
    assert split_text(text, Split("fixed", 1), spans) == [SplitPiece(i, i + 1) for i in range(3)]


PROSE = "# One\n\nFirst here. Second\none here! Third?\n\nA new paragraph. It ends.\n\n# Two\n\nLast words.\n"


@pytest.mark.parametrize(
    ("mode", "tokens", "ends"),
    [
        ("none", 1, ["words."]),
        ("sentence", 5, ["here.", "Third?", "ends.", "words."]),
        ("paragraph", 8, ["Third?", "Two", "words."]),
        ("section", 14, ["ends.", "words."]),
    ],
)
def test_where_pieces_end(mode, tokens, ends):
    pieces = split_text(PROSE, Split(mode, tokens), spans_of_words)
    assert [PROSE[p.start : p.end].split()[-1] for p in pieces] == ends
    assert mode == "none" or all(len(PROSE[p.start : p.end].split()) <= tokens for p in pieces)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        (("words",), "split.mode"),
        (("fixed", 0), "split.tokens"),
        (("fixed", 4, 3), "split.overlap"),
        (("fixed", 4, -1), "split.overlap"),
        (("none", 4, 1), "split.overlap"),
    ],
)
def test_what_cannot_be(values, param):
    with pytest.raises(BadRequest, check=lambda error: error.param == param):
        Split(*values)


# ---- the same pieces as by the obvious algorithm, with less counting


def plainly(text, split, spans):
    """Return the pieces when the whole text, and every candidate to its end, is tokenized."""
    if split.mode == "none" or not text.strip():
        return [SplitPiece(0, len(text))]
    if split.mode == "fixed":
        starts = [start for start, _ in spans(text)]
        found, first, at = [], 0, 0
        while at < len(text):
            following = first + split.tokens
            end = max(starts[following], at + 1) if following < len(starts) else len(text)
            found.append(SplitPiece(at, end))
            if end == len(text):
                break
            first = following - split.overlap
            at = max(starts[first], at + 1) if split.overlap else end
        return list(_tidy(text, found))
    kind = MarkdownSplitter if split.mode == "section" else TextSplitter
    splitter = kind.from_callback(lambda piece: len(list(spans(piece))), split.tokens, split.overlap, False)
    flat = re.sub(r"\s", " ", text) if split.mode == "sentence" else text
    found = [SplitPiece(start, start + len(piece)) for start, piece in splitter.chunk_indices(flat)]
    return list(_tidy(text, found))


@settings(max_examples=200, deadline=None, database=None)
@given(
    TEXT | TEXTS,
    st.sampled_from(MODES),
    st.integers(1, 12),
    st.integers(0, 6),
    st.sampled_from([*TOKENIZERS, "demo"]),
)
@example("\n a a river.", "paragraph", 1, 0, "metaspace")  # characters that are too many tokens by themselves
def test_the_pieces_are_those_of_the_obvious_algorithm(text, mode, tokens, overlap, name):
    split = Split(mode, tokens, 0 if mode == "none" else min(overlap, tokens // 2))
    spans = template(name).documents.spans
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpic.prompt.sliced_tokenizer.SLICE", 7)
        patch.setattr("mpic.prompt.sliced_tokenizer.COUNTED", 5)
        patch.setattr("mpic.prompt.split.SLICE", 3)
        found = split_text(text, split, spans, template(name).documents.counter(), 10_000)
    assert found == plainly(text, split, spans)


@pytest.mark.parametrize("mode", ["sentence", "paragraph", "section"])
def test_a_sentence_without_end_is_not_tokenized_again_for_every_piece(mode, monkeypatch):
    documents = template("demo").documents
    recorder = recorded(documents, monkeypatch)
    text = prose(60_000).replace(".", "")
    pieces = split_text(text, Split(mode, 100), documents.spans, documents.counter())
    assert "".join(text[p.start : p.end] for p in pieces) == text and len(pieces) > 50
    assert sum(recorder.sizes) < 30 * len(text)  # all of the rest for each piece would be more than 100


def test_a_text_that_gives_far_too_many_pieces_is_tokenized_no_further_than_to_know_it(monkeypatch):
    documents = template("demo").documents
    recorder = recorded(documents, monkeypatch)
    for mode in ("fixed", "sentence", "paragraph", "section"):
        with pytest.raises(TooManyPieces):
            split_text(prose(1_000_000), Split(mode, 4), documents.spans, documents.counter(), 9)
    assert sum(recorder.sizes) < 500_000


def test_splitting_ends_when_nobody_waits_for_it(monkeypatch):
    left, asked = threading.Event(), []

    def count(piece, most):
        asked.append(piece)
        if len(asked) == 5:
            left.set()
        return len(piece)

    with cancel.until(left), pytest.raises(cancel.Cancelled):
        split_text(prose(100_000), Split("sentence", 50), template("demo").documents.spans, count)
    assert len(asked) == 5


# ---- memory

MEASURED = """
import gc, re, sys
from hostile_texts import demo
from mpic.prompt import ChatTemplate
from mpic.prompt.split import Split, TooManyPieces, split_text

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

documents, most = ChatTemplate(demo(), "<image>").documents, 0
for unit in ("Aa.\\n\\n", "a\\n", "\\u6f22\\u5b57\\u3002", "e\\u0301\\U0001f469\\u200d\\U0001f467 "):
    text = unit * ((8 << 20) // len(unit.encode()))
    for mode in sys.argv[1:]:
        gc.collect()
        open("/proc/self/clear_refs", "w").write("5")
        before = status("VmRSS")
        try:
            split_text(text, Split(mode), documents.spans, documents.counter(), 1024)
        except TooManyPieces:
            pass
        most = max(most, status("VmHWM") - before)
print(most)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak of memory")
@pytest.mark.parametrize("mode", ["fixed", "section"])
def test_splitting_takes_at_most_ten_times_the_memory_of_the_text_whatever_it_is_made_of(mode):
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, mode],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert int(run.stdout) < 10 * (8 << 20)


@pytest.mark.parametrize("mode", ["sentence", "paragraph", "section"])
def test_no_more_of_a_text_is_counted_than_holds_the_first_piece_too_many(mode):
    counted = []
    count = lambda piece, most: counted.append(len(piece)) or len(piece.split())
    with pytest.raises(TooManyPieces):
        split_text("Aa bb.\n\n" * 200_000, Split(mode, 4), spans_of_words, count, 1024)
    assert max(counted) <= 1 << 14 and sum(counted) < 8 * 200_000


@pytest.mark.parametrize("mode", ["sentence", "paragraph", "section"])
@pytest.mark.parametrize("overlap", [0, 5])
def test_windows_do_not_change_where_pieces_of_plain_text_end(mode, overlap, monkeypatch):
    text = "\n\n".join(prose(200) for _ in range(60))
    split = Split(mode, 20, overlap)
    whole = split_text(text, split, spans_of_words)
    for name in ("LEAST_WINDOW", "WINDOW"):
        monkeypatch.setattr(f"mpic.prompt.split.{name}", 100)
    assert split_text(text, split, spans_of_words) == whole
