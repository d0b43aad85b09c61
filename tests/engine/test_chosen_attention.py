"""A model is served by the attention that was asked for. Where none was, Triton's serves it on CUDA."""

from types import SimpleNamespace

import pytest
import torch

from mpic.engine.native import choose
from mpic.errors import ModelRefused


class Model:
    """Stands for a loaded model on a device that this machine may not have.

    Attributes:
        chosen: what was selected, in order.
    """

    def __init__(self, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, lacks: str = "") -> None:
        self.device, self.dtype, self._lacks = torch.device(device), dtype, lacks
        self.chosen: list[str] = []
        self.info = SimpleNamespace(details={})

    def choose_attention(self, name: str) -> None:
        self.chosen.append(name)
        if name == "triton" and self._lacks:
            raise ModelRefused(f"attention 'triton' does not take {self._lacks}")
        self.info.details["attention_note"] = ""


@pytest.fixture
def tested(monkeypatch):
    """The attention of each self-test that has run; those in ``wrong`` fail."""
    run = SimpleNamespace(names=[], wrong=())

    def self_test(model: Model) -> float:
        run.names.append(model.chosen[-1])
        if model.chosen[-1] in run.wrong:
            raise ModelRefused("linked logits differ")
        return 0.0

    monkeypatch.setattr(choose, "self_test", self_test)
    return run


def test_in_half_precision_on_cuda_it_is_tritons_which_has_to_pass_the_self_test(tested):
    model = Model()
    choose.choose_attention(model, "auto")
    assert model.chosen == tested.names == ["triton"]


@pytest.mark.parametrize(("lacks", "wrong"), [("attention in both directions", ()), ("", ("triton",))])
def test_where_triton_does_not_take_the_model_or_computes_something_else_it_is_torchs_and_says_why(
    tested, caplog, lacks, wrong
):
    model, tested.wrong = Model(lacks=lacks), wrong
    choose.choose_attention(model, "auto")
    assert model.chosen[-1] == "auto"
    reason = lacks or "linked logits differ"
    assert reason in model.info.details["attention_note"] and reason in caplog.text


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_on_a_cpu_and_in_fp32_a_model_keeps_what_it_was_loaded_with(tested, device, dtype):
    model = Model(device, dtype)
    choose.choose_attention(model, "auto")
    assert model.chosen == tested.names == []


def test_what_was_asked_for_by_name_is_taken_or_refused(tested):
    model, tested.wrong = Model(), ("cuda-flash",)
    choose.choose_attention(model, "reference")
    assert model.chosen == tested.names == ["reference"]
    with pytest.raises(ModelRefused, match="both directions"):
        choose.choose_attention(Model(lacks="attention in both directions"), "triton")
    with pytest.raises(ModelRefused, match="differ"):
        choose.choose_attention(Model(), "cuda-flash")
