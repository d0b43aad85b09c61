"""A server keeps the proofs of its self-tests in its data folder, and says when they passed."""

from __future__ import annotations

from server_helpers import running

from mpic.config import load_config
from mpic.model import proof_subject
from mpic.model.proofs import NAME
from mpic.server.run import build


async def test_the_next_start_uses_the_proofs_unless_the_tests_are_to_run_always(
    tmp_path, tiny_model, monkeypatch
):
    # sources may be edited while tests run
    monkeypatch.setattr(proof_subject, "_began", lambda: float("inf"))
    flags = {"data_dir": str(tmp_path / "library"), "model": tiny_model, "pool_bytes": 1 << 22}

    async def shown(**more):
        async with running(build(load_config(None, {**flags, **more}))) as server:
            return (await server.http.get("/health")).json()["model"]["details"]["self_test"]

    assert await shown() == "passed at this start"
    assert (tmp_path / "library" / NAME).is_file()
    assert "nothing it depends on has changed" in await shown()
    assert await shown(self_test="always") == "passed at this start"
    # as text, with the other attention
    assert "ran again at this start" in await shown(attention="reference")
    assert "ran again" not in await shown(attention="reference")
