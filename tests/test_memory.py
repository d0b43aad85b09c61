"""Exhausted memory ends requests, not the process."""

import errno
import gc
import platform
import subprocess
import sys
import textwrap
from unittest.mock import Mock

import pytest
import torch

from mpic import memory
from mpic.errors import OutOfMemory

MiB = 1 << 20


def test_memory_set_aside_is_not_promised_twice(monkeypatch):
    monkeypatch.setattr(memory, "room", lambda: memory.FLOOR + 100 * MiB)
    with memory.set_aside(60 * MiB, "the first"):
        with pytest.raises(OutOfMemory, match="the second needs 60 MiB") as refused:
            with memory.set_aside(60 * MiB, "the second"):
                pass
        with memory.set_aside(40 * MiB, "a smaller one"):
            pass
    with memory.set_aside(100 * MiB, "all of it"):
        pass
    assert (refused.value.status, refused.value.code) == (503, "out_of_memory")
    assert refused.value.retry_after > 0


def test_memory_of_failed_work_is_no_longer_set_aside(monkeypatch):
    monkeypatch.setattr(memory, "room", lambda: memory.FLOOR + 100 * MiB)
    for _ in range(3):
        with pytest.raises(KeyError):
            with memory.set_aside(60 * MiB, "it"):
                raise KeyError


def test_every_way_of_saying_that_memory_is_exhausted_becomes_one_error():
    for fail in (
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
        lambda: bytearray(1 << 60),
        Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")),
        Mock(side_effect=RuntimeError("can't start new thread")),
    ):
        with pytest.raises(OutOfMemory), memory.as_errors():
            fail()
    for other in (ValueError("x"), RuntimeError("shapes do not match"), FileNotFoundError(2, "gone")):
        with pytest.raises(type(other)), memory.as_errors():
            raise other


@pytest.mark.parametrize("words", [True, False], ids=["cut between words", "cut anywhere"])
def test_a_text_too_long_for_the_address_space_does_not_end_the_process(words):
    """The tokenizers library ends the process when an allocation fails. A text that may be cut is given to it in small
    slices."""
    script = """
        import resource
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
        from mpic import memory
        from mpic.errors import OutOfMemory
        from mpic.prompt.guarded_tokenizer import GuardedTokenizer

        class Stock:
            alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
            backend_tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
            backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            if not WORDS:
                backend_tokenizer.normalizer = normalizers.Strip()  # it must see where the text ends
            all_special_tokens, unk_token_id = [], None

            def __call__(self, text, add_special_tokens):
                return {"input_ids": self.backend_tokenizer.encode(text).ids}

        guarded = GuardedTokenizer(Stock())
        limit = memory._address_space() + (400 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        memory.few_arenas()  # the tokenizer starts a thread for each core
        try:
            print("tokens:", len(guarded.encode("word number 1, " * 330_000)))
        except OutOfMemory as error:
            print("refused:", error)
        print(len(guarded.encode("word number 1, " * 100)))
    """
    script = textwrap.dedent(script.replace("WORDS", str(words)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    end = 0 if words else 1  # without the space at the end
    first, last = f"tokens: {15 * 330_000 - end}\n", 1500 - end
    assert done.stdout.startswith(first) and done.stdout.endswith(f"\n{last}\n")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc reserves memory for threads")
def test_threads_do_not_reserve_a_limited_address_space():
    """Each of many threads would have 64 MiB reserved for itself, which nobody gets back."""
    script = """
        import resource, sys, threading
        from mpic import memory
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        if sys.argv[1] == "few":
            memory.few_arenas()
        before = memory._address_space()
        together = threading.Barrier(9)

        def work():
            kept = bytearray(50_000)
            together.wait()
            together.wait()

        for _ in range(8):
            threading.Thread(target=work).start()
        together.wait()
        print((memory._address_space() - before) >> 20)
        together.wait()
    """
    taken = {}
    for how in ("few", "many"):
        command = [sys.executable, "-c", textwrap.dedent(script), how]
        taken[how] = int(subprocess.run(command, capture_output=True, text=True).stdout)
    assert taken["many"] > 300 and taken["few"] < taken["many"] / 2


def test_the_cycle_collector_is_paused_inside_a_block_and_what_exists_at_its_end_is_exempt():
    before = gc.get_freeze_count()
    try:
        with memory.collector_paused():
            assert not gc.isenabled()
            with memory.collector_paused():
                assert not gc.isenabled()
            assert not gc.isenabled(), "the inner block has resumed it"
        assert gc.isenabled() and gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_a_block_that_fails_resumes_the_collector_and_exempts_nothing():
    before = gc.get_freeze_count()
    with pytest.raises(ValueError), memory.collector_paused():
        raise ValueError
    assert gc.isenabled() and gc.get_freeze_count() == before


def test_a_process_forked_while_the_collector_is_paused_collects():
    script = (
        "import gc, os\nfrom mpic import memory\nwith memory.collector_paused():\n    child = os.fork()\n"
        "    if child == 0:\n        os._exit(0 if gc.isenabled() else 1)\n"
        "    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with memory.collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
