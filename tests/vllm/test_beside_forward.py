"""vLLM's own forward over chunks that cross while it computes: its CPU worker places them as a GPU's does, through
small buffers and a device that copies late."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from slow_device import SlowDevice
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_faults import BOTH, TEXT
from vllm_links import assert_close

from mpic.engine.vllm.plugin.placement import Placement, TransferBuffers
from mpic.engine.vllm.plugin.runner import LinkRunner
from mpic.engine.vllm.plugin.transfers import TransferSizes

SIZE = 1 << 12
"""Bytes of a buffer: less than a layer of these chunks."""


@pytest.fixture
def beside(linker, monkeypatch, next_is_served):
    """The connector of an engine that places chunks so, with the ``placed`` layers as they were asked for."""
    connector, device = get_kv_transfer_group(), SlowDevice()
    runner, placed = connector._runner, []
    staging = TransferBuffers(torch.device("cpu"), device, TransferSizes(SIZE))

    def start(self, writes, requests):
        self._placing = requests
        self._placement = Placement(self.paged, self.rotation, writes, staging)

    def place(layer):
        if runner._placement is not None:
            placed.append(layer)
        runner.place_layer(layer)

    monkeypatch.setattr(LinkRunner, "_start_placing", start)
    monkeypatch.setattr(connector, "_place_layer", place)
    connector.placed, connector.device = placed, device
    yield connector
    monkeypatch.undo()
    device.close()


def ended(linker, salt: str, says: str) -> None:
    request, params = linker.link(TEXT, "mpic-4", salt=salt)
    (answer,) = linker.reported([request], [params])
    assert answer.reason == "error" and answer.report["error"] == "internal_error"
    assert says in answer.report["message"]


@pytest.mark.parametrize("policy", ["reuse", "mpic-4"])
def test_answers_equal_the_oracle_and_every_layer_is_asked_for_in_order(policy, beside, linker):
    for prompt in (TEXT, BOTH):
        (answer,) = linker.run(*zip(linker.link(prompt, policy, salt=f"beside {policy}")))
        assert_close(answer, linker.expected(prompt, policy))
    layers = list(beside._runner.paged.layers)
    assert beside.placed == layers * (len(beside.placed) // len(layers))
    assert len(beside.placed) >= 2 * len(layers)
    assert beside.device.done > 2 * len(layers), "layers were cut into several transfers"


def test_a_copy_that_is_not_waited_for_would_be_seen(beside, linker, monkeypatch):
    monkeypatch.setattr(beside.device, "follow", lambda mark: None)
    monkeypatch.setattr(beside.device, "_delays", (0.02,))
    (answer,) = linker.run(*zip(linker.link(TEXT, "mpic-4", salt="not waited")))
    _, logprobs = linker.expected(TEXT, "mpic-4")
    assert not (answer.logprobs - logprobs).abs().max() < 1e-4


def test_an_error_in_the_midst_of_the_forward_ends_its_request_alone(beside, linker, monkeypatch):
    monkeypatch.setattr(Placement, "_write", Mock(side_effect=RuntimeError("no room")))
    ended(linker, "error beside", "no room")


def test_a_forward_that_asks_for_no_layer_is_noticed(beside, linker, monkeypatch):
    monkeypatch.setattr(beside, "_place_layer", None)
    ended(linker, "nobody asks", "did not ask for all layers")
