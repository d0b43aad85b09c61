"""A library that was compiled by one model and is served by another."""

from server_helpers import real_server, save_tiny_llava


async def test_another_models_chunk_is_never_used(tmp_path):
    """The model's fingerprint reveals it; the chunk is compiled again, and the reason is reported."""
    answers = []
    for seed in (0, 0, 1):
        model = save_tiny_llava(tmp_path / f"model{seed}", seed)
        async with real_server(tmp_path / "data", model, pool_bytes=1 << 20) as server:
            if not answers:
                await server.uploaded(handle="PIC")
            [file] = (await server.http.get("/v1/files")).json()["data"]
            body = (await server.ask("IMAGE#PIC", mpic={"policy": "mpic-4"}, max_tokens=4)).json()
            ours = body["usage"]["mpic"]
            [chunk] = ours["chunks"]
            answers.append((file["tiers"], chunk["tier"], chunk["reason"], ours["tokens"]["compiled"]))
    assert answers == [
        (["disk"], "device", "policy", 0),
        (["disk"], "disk", "policy", 0),
        ([], "compiled", "model_changed", 16),
    ]
