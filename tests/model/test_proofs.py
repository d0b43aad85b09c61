"""Proofs of self-tests are used only for what they are proofs of, and only if nobody else can have written them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from unittest.mock import Mock

import pytest
import torch
from small_models import SMALL_PLAIN

from mpic.errors import ModelRefused
from mpic.kernels import c_kernel
from mpic.model import load, proof_subject
from mpic.model.load import load_model
from mpic.model.proofs import MOST, MOST_BYTES, NAME, Proof, Proofs, _parsed
from mpic.model.selftest import self_test


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "library"
    folder.mkdir(mode=0o700)
    return folder / NAME


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Sources may be edited while tests run; only the test about that sees it."""
    monkeypatch.setattr(proof_subject, "_began", lambda: float("inf"))


@pytest.fixture
def ran(monkeypatch):
    """The names of models whose self-test has run."""
    names = []

    def watched(loaded):
        names.append(loaded.info.name)
        return self_test(loaded)

    monkeypatch.setattr(load, "self_test", watched)
    return names


def start(place, model=str(SMALL_PLAIN), **options):
    proofs = Proofs(place, options.pop("always", False))
    return load_model(str(model), device="cpu", proofs=proofs, **options)


def test_the_first_start_runs_the_tests_and_the_second_uses_their_proofs(place, ran):
    first, second = start(place), start(place)
    assert ran == [SMALL_PLAIN.name]
    assert first.info.details["self_test"] == "passed at this start"
    assert "nothing it depends on has changed" in second.info.details["self_test"]
    assert second.info.details["self_test_error"] == first.info.details["self_test_error"] > 0


def test_without_a_place_nothing_is_kept_and_always_runs_everything(place, ran):
    load_model(str(SMALL_PLAIN), device="cpu")
    load_model(str(SMALL_PLAIN), device="cpu")
    start(place, always=True)
    assert start(place, always=True).info.details["self_test"] == "passed at this start"
    assert len(ran) == 4
    start(place)  # what always has proved serves others
    assert len(ran) == 4


def test_another_dtype_attention_and_number_of_threads_are_tested_again(place, ran):
    loaded = start(place)
    own, threads = proof_subject.subject(loaded, "text"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:  # how many there really are is the machine's business
        patch.setattr(torch, "get_num_threads", lambda: threads + 1)
        start(place)
    start(place)
    assert len(ran) == 2
    loaded.choose_attention("reference")
    assert proof_subject.subject(loaded, "text") != own
    start(place, dtype="bfloat16")
    assert len(ran) == 3


def test_one_changed_weight_is_another_model(place, ran):
    start(place)
    plain = load.load_weights

    def one_changed(*arguments):
        model = plain(*arguments)
        weight = model.get_output_embeddings().weight.data
        weight[-1, -1] += 1
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "load_weights", one_changed)
        start(place)
    assert len(ran) == 2


@pytest.mark.parametrize(
    "target, value",
    [
        ("mpic.model.proof_subject.VERSION", "0.0.1"),
        ("torch.__version__", "1.0"),
        ("transformers.__version__", "1.0"),
        ("platform.node", lambda: "another-machine"),
        ("mpic.model.proof_subject._processor", lambda: "model name: another"),
        ("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT"),
    ],
)
def test_other_software_and_another_machine_need_their_own_proof(place, monkeypatch, target, value):
    loaded = start(place)
    before = proof_subject.subject(loaded, "text")
    monkeypatch.setattr(target, value)
    assert proof_subject.subject(loaded, "text") != before


def test_the_environment_of_torch_and_the_name_of_the_test_are_covered(place, monkeypatch):
    loaded = start(place)
    before = proof_subject.subject(loaded, "text")
    assert proof_subject.subject(loaded, "images") != before
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert proof_subject.subject(loaded, "text") != before


def test_a_source_edited_in_place_is_tested_again_even_with_its_old_time_and_size(
    place, monkeypatch, tmp_path
):
    loaded = start(place)
    source = tmp_path / "hooks.py"
    source.write_text("a = 1\n")
    times = os.stat(source)
    monkeypatch.setattr(proof_subject, "_own_sources", lambda: (str(source),))
    before = proof_subject.subject(loaded, "text")
    while os.stat(source).st_ctime_ns == times.st_ctime_ns:  # the file system's clock may be coarse
        source.write_text("a = 2\n")
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert os.stat(source).st_mtime_ns == times.st_mtime_ns and os.stat(source).st_size == times.st_size
    assert proof_subject.subject(loaded, "text") != before


def test_sources_of_ours_and_of_transformers_are_covered(place):
    loaded = start(place)
    own, others = proof_subject._own_sources(), proof_subject._model_sources(loaded)
    ours = ("model/hooks.py", "model/selftest.py", "kernels/attention.py", "kernels/stream.c", "kv/pool.py")
    for name in ours:
        assert any(path.endswith(name) for path in own)
    for name in ("modeling_llama.py", "masking_utils.py", "modeling_rope_utils.py", "nn/modules/linear.py"):
        assert any(path.endswith(name) for path in others)


def test_a_built_kernel_that_differed_when_it_was_loaded_is_tested_again(place, monkeypatch, tmp_path):
    """Its file may be gone since: a user may empty the cache folder."""
    loaded, kernel = start(place), tmp_path / "kernel.so"
    monkeypatch.setattr(c_kernel, "libraries", {kernel: "one"})
    before = proof_subject.subject(loaded, "text")
    monkeypatch.setattr(c_kernel, "libraries", {kernel: "two"})
    assert proof_subject.subject(loaded, "text") != before


def test_a_kernel_is_known_by_what_was_loaded(tmp_path, monkeypatch):
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }")
    monkeypatch.setattr(c_kernel, "libraries", {})
    monkeypatch.setattr(c_kernel, "_cache_folder", lambda: tmp_path)
    assert c_kernel.build(source, "test", []).one() == 1
    ((path, digest),) = c_kernel.libraries.items()
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_nothing_is_kept_if_a_source_has_changed_since_the_process_began(place, ran, monkeypatch, caplog):
    monkeypatch.setattr(proof_subject, "_began", lambda: 0.0)
    with caplog.at_level(logging.INFO):
        start(place)
        start(place)
    assert len(ran) == 2 and not place.exists() and "have changed since" in caplog.text


def test_a_failing_test_is_not_kept(place, monkeypatch):
    monkeypatch.setattr(load, "self_test", Mock(side_effect=ModelRefused("logits differ")))
    for _ in range(2):
        with pytest.raises(ModelRefused, match="differ"):
            start(place)
    assert not place.exists()


KEY = "0" * 64
GOOD = {"error": 1e-6, "passed": "2026-01-01T00:00:00+00:00"}
FORGED = {
    "cut": b'{"format": 1, "proofs": {"',
    "empty": b"",
    "not text": b"\xff\xfe\x00",
    "deep": b"[" * 60_000,
    "a list": b"[]",
    "another format": json.dumps({"format": 2, "proofs": {KEY: GOOD}}).encode(),
    "no proofs": b'{"format": 1, "proofs": [1]}',
    "more keys": json.dumps({"format": 1, "proofs": {KEY: {**GOOD, "code": "x"}}}).encode(),
    "no number": json.dumps({"format": 1, "proofs": {KEY: {**GOOD, "error": "0"}}}).encode(),
    "not finite": json.dumps({"format": 1, "proofs": {KEY: {**GOOD, "error": float("nan")}}}).encode(),
    "an error that fails": json.dumps({"format": 1, "proofs": {KEY: {**GOOD, "error": 3.0}}}).encode(),
    "no time": json.dumps({"format": 1, "proofs": {KEY: {**GOOD, "passed": 7}}}).encode(),
    "too large": b" " * (MOST_BYTES + 1),
}


@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED)
def test_a_damaged_file_is_ignored_said_and_replaced(place, ran, caplog, content):
    place.write_bytes(content)
    start(place)
    assert len(ran) == 1 and "is ignored" in caplog.text
    start(place)
    assert len(ran) == 1


def test_a_file_or_folder_that_others_can_write_is_not_trusted(place, ran, caplog):
    start(place)
    place.chmod(0o622)
    start(place)
    assert len(ran) == 2 and "others can write it" in caplog.text
    start(place)  # the second start has replaced the file
    assert len(ran) == 2
    place.parent.chmod(0o777)
    start(place)
    start(place)
    assert len(ran) == 4 and "run at every start" in caplog.text


def test_a_link_a_fifo_and_a_folder_in_its_place_are_not_read(place, ran, tmp_path):
    start(place)
    shutil.move(place, tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    start(place)
    assert len(ran) == 2 and not place.is_symlink()
    place.unlink()
    os.mkfifo(place)
    start(place)
    assert len(ran) == 3 and place.is_file()
    place.unlink()
    place.mkdir()
    start(place)  # nothing can take the place of a folder
    assert len(ran) == 4 and list(place.parent.iterdir()) == [place]


def test_the_newest_proofs_are_kept(place):
    old = {f"{n:064}": {**GOOD, "passed": f"2020-01-01T00:00:{n:02}+00:00"} for n in range(MOST)}
    place.write_text(json.dumps({"format": 1, "proofs": old}))
    place.chmod(0o600)
    new = 2 + (start(place).program is not None)
    kept = _parsed(place.read_bytes())
    assert len(kept) == MOST and f"{new - 1:064}" not in kept and f"{new:064}" in kept
    assert all(isinstance(one, Proof) for one in kept.values())
    assert place.stat().st_mode & 0o777 == 0o600


def test_a_start_goes_on_where_the_file_cannot_be_written(place, ran, monkeypatch, caplog):
    monkeypatch.setattr("mpic.model.proofs.write_durably", Mock(side_effect=OSError(28, "no space left")))
    start(place)
    assert len(ran) == 1 and "cannot be written" in caplog.text
