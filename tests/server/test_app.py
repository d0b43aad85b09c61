"""Models, health, documentation, and routes that are not there."""

import re
from unittest.mock import Mock

import pytest
from server_helpers import fake_server, refusal

from mpic.config import Config, ServerConfig
from mpic.errors import EngineStopped


async def test_models(server):
    [model] = (await server.http.get("/v1/models")).json()["data"]
    assert model["id"] == "fake" and model["object"] == "model"
    assert model["context_length"] == 512 and model["modalities"] == ["text", "image"]
    assert "mpic-K" in model["policies"] and model["presses"] == ["snapkv-R"]
    assert (await server.http.get("/v1/models/fake")).json() == model
    assert refusal(await server.http.get("/v1/models/other/name")) == (404, "model_not_found")


async def test_health_describes_what_runs(server):
    body = (await server.http.get("/health")).json()
    assert body["live"] and body["ready"] and body["status"] == "ok"
    assert body["model"]["name"] == "fake" and body["model"]["attention"] == "reference"
    assert body["engine"]["pages"]["free"] == 400
    assert "mpic-K" in body["policies"] and body["policy"] == "mpic-16"
    assert body["presses"] == ["snapkv-R"] and body["press"] == ""
    assert (await server.http.get("/health/live")).json() == {"live": True}
    assert (await server.http.get("/health/ready")).json() == {"ready": True}


async def test_health_when_the_engine_is_down(server, monkeypatch):
    monkeypatch.setattr(server.engine, "ready", Mock(side_effect=EngineStopped("stopped")))
    for path in ("/health", "/health/ready"):
        answer = await server.http.get(path)
        assert answer.status_code == 503 and not answer.json()["ready"]
    assert (await server.http.get("/health/live")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/embeddings", 405, "method_not_allowed"),
        ("POST", "/v1/images/generations", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/files", 405, "method_not_allowed"),
        ("GET", "/nothing", 404, "not_found"),
    ],
)
async def test_unknown_routes(server, method, path, status, code):
    answer = await server.http.request(method, path)
    assert refusal(answer) == (status, code)
    assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}
    if path == "/v1/chat/completions":
        assert answer.headers["allow"] == "POST"


async def test_home_and_docs(server):
    answer = await server.http.get("/")
    assert answer.status_code == 307 and answer.headers["location"] == "/ui"
    page = await server.http.get("/docs")
    assert "<a href=ui>" in page.text
    assert "/v1/chat/completions" in page.text and "Compare IMAGE#EIFFEL2025" in page.text
    # nothing from elsewhere
    assert not re.search(r"(src|href)=['\"]?(https?:)?//|<script|@import", page.text)
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    schema = (await server.http.get("/openapi.json")).json()
    assert "/v1/chat/completions" in schema["paths"]
    for path in schema["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]


async def test_an_unexpected_exception_leaks_nothing(server, monkeypatch, caplog):
    monkeypatch.setattr(server.library.files, "get", Mock(side_effect=KeyError("/secret/path")))
    answer = await server.http.get("/v1/files/file-x")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (500, "internal_error", "server_error")
    assert "secret" not in answer.text and "/secret/path" in caplog.text


async def test_shutdown_closes_engine_and_library(tmp_path, template):
    async with fake_server(tmp_path, template) as server:
        engine = server.engine
    assert engine.closed
    async with fake_server(tmp_path, template):  # the library's folder was let go
        pass


async def test_the_model_answers_to_the_names_that_an_administrator_lists(tmp_path, template):
    config = Config(server=ServerConfig(model_names="gpt-4o-mini, org/model, fake"))
    async with fake_server(tmp_path, template, config=config) as server:
        listed = (await server.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["fake", "gpt-4o-mini", "org/model"]
        assert (await server.http.get("/v1/models/org/model")).json() == listed[2]
        said = {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
        for path, body in {
            "/v1/chat/completions": said,
            "/v1/messages": said,
            "/v1/messages/count_tokens": {"messages": said["messages"]},
            "/v1/responses": {"input": "hello"},
            "/v1/completions": {"prompt": "hello"},
            "/tokenize": {"prompt": "hello"},
        }.items():
            answer = await server.http.post(path, json={**body, "model": "gpt-4o-mini"})
            assert answer.status_code == 200 and answer.json().get("model", "fake") == "fake", path
            refused = await server.http.post(path, json={**body, "model": "gpt-4o"})
            assert refused.status_code == 404 and "model_names" in refused.json()["error"]["message"], path


async def test_a_star_takes_any_name_of_the_model_and_lists_none(tmp_path, template):
    async with fake_server(tmp_path, template, config=Config(server=ServerConfig(model_names="*"))) as server:
        assert [m["id"] for m in (await server.http.get("/v1/models")).json()["data"]] == ["fake"]
        assert (await server.ask(model="anything")).status_code == 200
        assert (await server.http.get("/v1/models/anything")).json()["id"] == "anything"
