"""Compression over HTTP: a request's press, else the server's."""

from dataclasses import replace

import pytest
from server_helpers import fake_server, refusal

from mpic.config import Config, ConfigError, EngineConfig, check_engine

CONFIG = replace(Config(), engine=replace(EngineConfig(), press="snapkv-50", policy="mpic-16"))


async def presses_of(server, **options):
    """The presses under which an answer's chunks are linked."""
    answer = await server.ask("IMAGE#RED", mpic=options)
    assert answer.status_code == 200, answer.text
    return [chunk.press for chunk in server.engine.requests[-1].prompt.chunks]


async def test_chunks_are_compressed_as_a_request_asks(server):
    await server.uploaded(handle="RED")
    assert server.engine.compiled[-1].press == ""
    assert await presses_of(server) == [""]
    assert await presses_of(server, press="tova-30", policy="mpic-16") == ["tova-30"]
    assert await presses_of(server, press="none", policy="full") == ["none"]


async def test_a_servers_own_press_is_that_of_uploads_and_of_requests_that_name_none(tmp_path, template):
    async with fake_server(tmp_path, template, config=CONFIG) as server:
        await server.uploaded(handle="RED")
        assert server.engine.compiled[-1].press == "snapkv-50"
        assert await presses_of(server) == ["snapkv-50"]
        assert await presses_of(server, policy="full") == ["snapkv-50"]  # which reads no compiled chunk
        assert await presses_of(server, press="none") == ["none"]
        assert (await server.http.get("/health")).json()["press"] == "snapkv-50"


async def test_an_upload_says_how_it_is_compressed_and_prompts_follow_unless_they_say_otherwise(
    tmp_path, template
):
    async with fake_server(tmp_path, template, config=CONFIG) as server:
        file = await server.uploaded(handle="RED", press="snapkv-040")
        assert file["press"] == "snapkv-40" and server.engine.compiled[-1].press == "snapkv-40"
        assert await presses_of(server) == ["snapkv-40"]
        assert await presses_of(server, press="none") == ["none"]
        again = (await server.upload(handle="RED", press="snapkv-40")).json()
        assert again["outcome"] == "unchanged"
        assert (await server.upload(handle="RED")).json()["outcome"] == "unchanged"
        other = await server.upload(handle="RED", press="none")
        assert other.json()["error"]["code"] == "handle_taken"
        replaced = await server.uploaded(handle="RED", press="none", replace="true")
        assert replaced["press"] == "none" and await presses_of(server) == ["none"]
        for press, code in (("best-50", "unknown_press"), ("tova-50", "unsupported_parameter")):
            assert refusal(await server.upload(handle="BLUE", press=press)) == (400, code)
    async with fake_server(tmp_path, template) as server:  # it is still known after a restart
        assert await presses_of(server) == ["none"]


@pytest.mark.parametrize(
    "options, says",
    [
        ({"press": "best-50"}, "unknown press 'best-50'; available: none, random-R"),
        ({"press": "snapkv-50", "policy": "mpic-32"}, "ask for snapkv-50-32"),
        ({"press": "snapkv-50", "policy": "a3-15"}, "policy a3-15 may recompute any token"),
        ({"press": "snapkv-50", "engine": "vllm"}, "not on the vllm engine"),
    ],
)
def test_a_press_that_does_not_go_with_the_rest_is_refused_at_start(options, says):
    with pytest.raises(ConfigError, match=says, check=lambda error: error.param == "press"):
        check_engine(replace(EngineConfig(), **options))
