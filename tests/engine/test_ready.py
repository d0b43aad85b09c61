"""Readiness is decided by the engine itself."""

import pytest

from mpic.errors import EngineStopped


def test_a_closed_engine_is_not_ready(make_engine):
    engine = make_engine()
    engine.ready()
    pages = engine.stats()["pages"]
    assert pages["free"] + pages["chunks"] + pages["prefix"] + pages["running"] == pages["total"]
    engine.close()
    with pytest.raises(EngineStopped):
        engine.ready()
