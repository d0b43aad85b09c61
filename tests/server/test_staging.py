"""The staging ring of a CUDA device is a part of the budget of host memory."""

from __future__ import annotations

import pytest

from mpic.config import ConfigError, load_config
from mpic.kv import staging
from mpic.server.staging import with_staging


@pytest.fixture(autouse=True)
def large_machine(monkeypatch):
    monkeypatch.setattr(staging.memory, "room", lambda: 1 << 40)


def settled(**flags):
    config = load_config(None, flags)
    return with_staging(config, config.library.limits())


def test_what_the_ring_takes_is_left_out_of_the_budget_of_chunks_in_host_memory():
    config, limits = settled()
    assert (config.engine.staging_slots, config.engine.staging_slot_bytes) == (16, 64 << 20)
    assert limits.host_bytes == (8 << 30) - (1 << 30)
    config, limits = settled(staging_slots=3, staging_slot_bytes=1 << 17, host_bytes=1 << 20)
    assert (config.engine.staging_slots, config.engine.staging_slot_bytes) == (3, 1 << 17)
    assert limits.host_bytes == (1 << 20) - 3 * (1 << 17)


def test_without_such_a_budget_there_is_a_ring_and_no_chunks_in_host_memory():
    config, limits = settled(host_bytes=0)
    assert config.engine.staging_slot_bytes == 64 << 20 and limits.host_bytes == 0


def test_a_ring_that_leaves_no_room_for_chunks_is_refused_by_name():
    with pytest.raises(ConfigError, match="leave nothing of host_bytes = 1048576"):
        settled(staging_slots=16, staging_slot_bytes=1 << 16, host_bytes=1 << 20)
