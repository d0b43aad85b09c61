"""A library that was compiled by one model and is served by another."""

from server_helpers import running, save_tiny_llava

from mpic.config import EngineConfig
from mpic.engine import load_engine
from mpic.library import Library
from mpic.prompt import ChatTemplate
from mpic.server import create_app


async def test_another_models_chunk_is_never_used(tmp_path):
    """The model's fingerprint reveals it; the chunk is compiled again, and the reason is reported."""
    answers = []
    for seed in (0, 0, 1):
        model = save_tiny_llava(tmp_path / f"model{seed}", seed)
        library = Library.open(tmp_path / "data")
        engine, processor = load_engine(EngineConfig(model=str(model), pool_bytes=1 << 20), library.store)
        async with running(create_app(engine, library, ChatTemplate(processor))) as server:
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
