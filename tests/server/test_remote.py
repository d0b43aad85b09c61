"""Two servers over one store: what one has compiled the other loads, and shows where its chunks come from."""

from remote_kit import settled
from server_helpers import data_url, png, running

from mpic.config import load_config
from mpic.server.run import build


async def test_a_server_answers_with_chunks_that_another_has_compiled_and_shows_the_tier(
    tmp_path, tiny_model
):
    (tmp_path / "store").mkdir()
    flags = {"model": tiny_model, "pool_bytes": 1 << 22, "remote": f"file://{tmp_path}/store"}
    image = {"type": "image_url", "image_url": {"url": data_url(png())}}
    content, shown = [image, {"type": "text", "text": "What is it?"}], []
    for name in ("a", "b"):
        app = build(load_config(None, {**flags, "data_dir": str(tmp_path / name)}))
        async with running(app) as server:
            answer = (
                await server.ask(content, max_tokens=8, mpic={"policy": "mpic-4", "trace": True})
            ).json()
            (use,) = answer["usage"]["mpic"]["chunks"]
            states = {span["state"] for span in answer["usage"]["mpic"]["trace"]["spans"]}
            shown.append((answer["choices"][0]["message"]["content"], use["tier"], use["tier"] in states))
            settled(server.library)
            health = (await server.http.get("/health")).json()
            metrics = (await server.http.get("/metrics")).text.splitlines()
    assert [tier for _, tier, _ in shown] == ["compiled", "remote"] and shown[0][0] == shown[1][0]
    assert all(traced for _, _, traced in shown)
    assert list(health["tiers"]) == ["disk", "remote"]
    remote = health["tiers"]["remote"]
    assert (remote["requested"], remote["hits"], remote["up"], remote["slower"]) == (1, 1, 1, 0)
    for name, value in (("hits_total", 1), ("up", 1), ("slower_total", 0), ("uploads_waiting", 0)):
        assert f'mpic_tier_{name}{{tier="remote"}} {value}.0' in metrics
