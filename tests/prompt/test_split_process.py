"""A long text is split in a separate process, into the same pieces, and only while a caller waits."""

import subprocess
import sys
import threading

import pytest
from hostile_texts import SCRIPTS, demo, prose, sentencepiece

from mpic import cancel
from mpic.errors import Unavailable
from mpic.prompt import ChatTemplate, split_process
from mpic.prompt.split import Split, TooManyPieces, split_text

TEXT = "\n\n".join((*SCRIPTS, "# A heading", prose(3_000), "- a\n- b\n" * 20, "🙂" * 50))


@pytest.fixture
def documents():
    return ChatTemplate(demo(), image_token="<image>").documents


@pytest.fixture
def started(monkeypatch):
    """Record every process that is started, and treat no text as short."""
    monkeypatch.setattr(split_process, "SHORT", 0)
    processes, popen = [], subprocess.Popen

    def start(*args, **options):
        processes.append(popen(*args, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return processes


@pytest.mark.parametrize(
    ("tokenizer", "split"),
    [
        (demo, Split("section", 60)),
        (demo, Split("paragraph", 60, 20)),
        (sentencepiece, Split("sentence", 60)),
    ],
)
def test_the_pieces_are_the_same(tokenizer, split, started):
    documents = ChatTemplate(tokenizer()).documents
    pieces = split_process.split_in_process(TEXT, split, documents, 1_000)
    assert len(started) == 1 and len(pieces) > 5
    assert pieces == split_text(TEXT, split, documents.spans, documents.counter())


def test_too_many_pieces_are_refused_there_too(documents, started):
    with pytest.raises(TooManyPieces):
        split_process.split_in_process(TEXT, Split("sentence", 10), documents, 3)
    assert len(started) == 1


def test_short_texts_and_fixed_pieces_need_no_process(documents, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    for mode in ("none", "fixed", "sentence", "paragraph", "section"):
        assert split_process.split_in_process(TEXT, Split(mode, 100), documents, 1_000)
    assert split_process.split_in_process(TEXT * 50, Split("fixed", 1_000), documents, 1_000)


def test_the_process_is_ended_when_nobody_waits_for_it(documents, started):
    left = threading.Event()
    threading.Timer(0.3, left.set).start()
    text = prose(8_000_000).replace(".", "")  # minutes of work
    with cancel.until(left), pytest.raises(cancel.Cancelled):
        split_process.split_in_process(text, Split("sentence", 20_000), documents, 1_000)
    assert started[0].returncode == -9


@pytest.mark.parametrize("broken", [["-c", "import os; os.abort()"], ["-c", "raise MemoryError('enough')"]])
def test_a_process_that_ends_by_itself_is_an_error_that_may_be_gone_next_time(
    broken, documents, started, monkeypatch
):
    popen = subprocess.Popen
    instead = lambda command, **options: popen([sys.executable, *broken], **options)
    monkeypatch.setattr(subprocess, "Popen", instead)
    with pytest.raises(Unavailable, match=r"MemoryError: enough|status -6"):
        split_process.split_in_process(TEXT, Split("sentence", 100), documents, 1_000)


def test_modules_in_the_working_folder_are_not_run(documents, started, tmp_path, monkeypatch):
    for name in ("tokenizers", "random", "mpic"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a stranger')")
    monkeypatch.chdir(tmp_path)
    assert len(split_process.split_in_process(TEXT, Split("section", 60), documents, 1_000)) > 5
    assert len(started) == 1


def test_the_process_imports_neither_torch_nor_transformers():
    code = "import sys, mpic.prompt.split_process; print({'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
