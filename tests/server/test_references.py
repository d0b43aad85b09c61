"""``/v1/references`` over a fake engine and the bundled embedder."""

from __future__ import annotations

import json

import pytest
from server_helpers import data_url, fake_server, png, refusal

from mpic.config import Config, RetrievalConfig

ID = "ref_lamp"
RED = data_url(png("red"))


async def add(server, content=b"The code of the lamp is 123.", name="lamp.txt", **form):
    return await server.http.post("/v1/references", data=form, files={"file": (name, content)})


async def search(server, **body):
    return await server.http.post("/v1/references/search", json=body)


async def test_a_reference_is_added_listed_read_replaced_and_removed(server):
    metadata = {"room": "hall", "year": 2024}
    made = (await add(server, id=ID, title="Lamp", description="d", metadata=json.dumps(metadata))).json()
    assert (made["id"], made["object"], made["version"], made["kind"]) == (ID, "reference", 1, "text")
    assert (made["title"], made["metadata"], made["thumbnail"]) == ("Lamp", metadata, None)
    assert (await server.settled(ID, "references"))["tokens"] == 36
    assert server.engine.compiled[0].owner == "@shared"
    picture = (await add(server, png("red"), "red.png")).json()
    assert picture["title"] == "red.png"
    assert picture["thumbnail"] == f"/v1/references/{picture['id']}/thumbnail"
    listed = (await server.http.get("/v1/references", params={"order": "asc"})).json()
    assert [r["id"] for r in listed["data"]] == [ID, picture["id"]] and not listed["has_more"]
    only = (await server.http.get("/v1/references", params={"kind": "image", "limit": 1})).json()
    assert [r["id"] for r in only["data"]] == [picture["id"]]
    again = await server.http.put(f"/v1/references/{ID}", files={"file": ("n.txt", b"new words")})
    assert again.json()["version"] == 2 and again.json()["title"] == "Lamp"
    content = await server.http.get(f"/v1/references/{ID}/content")
    assert content.content == b"new words" and content.headers["content-disposition"].startswith("attachment")
    thumbnail = await server.http.get(picture["thumbnail"])
    assert thumbnail.headers["content-type"] == "image/png" and thumbnail.content.startswith(b"\x89PNG")
    gone = await server.http.delete(f"/v1/references/{ID}")
    assert gone.json() == {"id": ID, "object": "reference", "deleted": True}
    assert (await server.http.get(f"/v1/references/{ID}")).json()["error"]["code"] == "reference_not_found"
    assert len(server.engine.forgotten) >= 1


async def test_a_search_finds_by_text_and_image_at_once_after_adding(server):
    await add(server, title="Lamp", id=ID)
    await add(server, b"The city of Ana Moss is Rome.", title="Ana", id="ref_ana", metadata='{"who": "Ana"}')
    await add(server, png("red"), "red.png", id="ref_red")

    async def found(**body):
        answer = await search(server, **body)
        assert answer.status_code == 200, answer.text
        return [(r["id"], r["score"]) for r in answer.json()["data"]]

    assert (await found(query="code of lamp"))[0][0] == ID
    assert [id for id, _ in await found(query="code of lamp", filter={"who": "Ana"})] == ["ref_ana"]
    ((id, score),) = await found(image=RED, top_k=1)
    assert id == "ref_red" and score > 0.99
    await server.http.delete(f"/v1/references/{ID}")
    assert ID not in [id for id, _ in await found(query="code of lamp")]
    state = (await server.http.get("/v1/references/index")).json()
    assert state["vectors"] == state["references"] == 2 and state["missing"] == 0
    assert (await server.http.post("/v1/references/reindex")).status_code == 202


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "empty_query", "query"),
        ({"query": "  "}, "empty_query", "query"),
        ({"query": "x", "top_k": 0}, "invalid_value", "top_k"),
        ({"query": "x", "top_k": 101}, "invalid_value", "top_k"),
        ({"query": "x", "min_score": 2}, "invalid_value", "min_score"),
        ({"query": "x", "filter": {"a": {"like": "b"}}}, "bad_request", "filter.a.like"),
        ({"image": "http://elsewhere/x.png"}, "bad_request", "image"),
        ({"image": "data:image/png;base64,!"}, "bad_request", "image"),
        ({"image": "data:image/png;base64,é"}, "bad_request", "image"),
        ({"query": "x", "filter": {"year": 10**400}}, "bad_request", None),
        ({"query": "x", "filter": {"user": None}}, "bad_request", "filter.user"),
        ({"query": "x", "colour": "red"}, None, "colour"),
    ],
)
async def test_meaningless_searches_are_refused(body, code, param, server):
    await add(server, metadata='{"year": 3}')
    answer = await search(server, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param in (None, error["param"]) and (code in (None, error["code"]) or code == "invalid_value")


async def test_bad_uploads_are_refused_and_leave_nothing(server):
    for content, form in (
        (b"\x89PNG bad", {}),
        (b"text", {"metadata": "[1]"}),
        (b"text", {"metadata": "{"}),
        (b"text", {"metadata": '{"a": [1]}'}),
        (b"text", {"metadata": '{"a": "\\ud800"}'}),
        (b"text", {"metadata": "[" * 100_000}),
        (b"text", {"id": "lamp"}),
        (b"text", {"handle": "X"}),
    ):
        answer = await add(server, content, **form)
        assert answer.status_code == 400, (answer.text, form)
    assert (await server.http.get("/v1/references")).json()["data"] == []
    await add(server, id=ID)
    assert (await add(server, id=ID)).json()["error"]["code"] == "reference_exists"
    missing = await server.http.put("/v1/references/ref_none", files={"file": ("n", b"x")})
    assert missing.status_code == 404
    assert (await server.http.get(f"/v1/references/{ID}/thumbnail")).status_code == 404


async def test_users_read_and_search_and_only_admins_write(server):
    admin, user = server.key("boss", "admin"), server.key("ana")
    files = {"file": ("l.txt", b"words")}
    made = await server.http.post("/v1/references", data={"id": ID}, files=files, headers=admin)
    assert made.status_code == 200
    for call in (
        server.http.post("/v1/references", files=files, headers=user),
        server.http.put(f"/v1/references/{ID}", files=files, headers=user),
        server.http.delete(f"/v1/references/{ID}", headers=user),
        server.http.post("/v1/references/reindex", headers=user),
        server.http.get("/v1/references/index", headers=user),
    ):
        assert (await call).status_code == 403
    for path in ("", f"/{ID}", f"/{ID}/content"):
        assert (await server.http.get(f"/v1/references{path}", headers=user)).status_code == 200
    server.http.headers.update(user)
    assert [r["id"] for r in (await search(server, query="words")).json()["data"]] == [ID]
    asked = await server.ask([{"type": "file", "file_id": ID}, {"type": "text", "text": "?"}])
    assert asked.status_code == 200 and server.engine.requests[-1].prompt.chunks[0].owner == "@shared"


async def test_always_inserts_and_cites_what_the_last_message_finds(server):
    await add(server, title="Lamp", id=ID)
    await add(server, png("red"), "red.png", title="Red", id="ref_red")
    answer = await server.ask("What is the code of the lamp?", mpic={"retrieval": {"mode": "always"}})
    body = answer.json()
    (note,) = body["choices"][0]["message"]["annotations"]
    cited = note["reference_citation"]
    assert note["type"] == "reference_citation" and cited["reference_id"] == ID and cited["title"] == "Lamp"
    (round,) = body["usage"]["mpic"]["retrieval"]
    assert round["references"] == [ID] and round["error"] is None and round["query"].startswith("What is")
    (chunk,) = server.engine.requests[-1].prompt.chunks
    assert chunk.file_id == ID
    content = [{"type": "image_url", "image_url": {"url": RED}}]
    images = {"mode": "always", "filter": {"kind": "image"}}
    body = (await server.ask(content, mpic={"retrieval": images})).json()
    (note,) = body["choices"][0]["message"]["annotations"]
    assert note["reference_citation"]["reference_id"] == "ref_red"
    assert len(server.engine.requests[-1].prompt.chunks) == 2
    answer = await server.ask("x", mpic={"retrieval": {"mode": "always", "min_score": 1.0}})
    assert answer.json()["usage"]["mpic"]["retrieval"][0]["error"] == "nothing_found"
    assert server.engine.requests[-1].prompt.chunks == ()


async def test_always_cites_in_the_stream_before_the_answer(server):
    await add(server, title="Lamp", id=ID)
    answer = await server.ask("the lamp?", stream=True, mpic={"retrieval": "always"})
    first = json.loads(answer.text.splitlines()[0].removeprefix("data: "))
    assert first["choices"][0]["delta"]["annotations"][0]["reference_citation"]["reference_id"] == ID


@pytest.mark.parametrize(
    "retrieval",
    ["sometimes", {"mode": "auto", "top_k": 0}, {"mode": "auto", "rounds": 9}, {"mode": "auto", "k": 1}],
)
async def test_unknown_or_unbounded_retrieval_is_refused(retrieval, server):
    answer = await server.ask("x", mpic={"retrieval": retrieval})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("mpic.retrieval")


async def test_the_models_own_call_is_refused_for_a_model_that_has_none(server):
    answer = await server.ask("x", mpic={"retrieval": {"mode": "auto", "trigger": "call"}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "mpic.retrieval.trigger")
    assert "always" in error["message"] and "prompted" in error["message"]


async def test_without_retrieval_the_answer_has_none(server):
    body = (await server.ask("x")).json()
    assert "annotations" not in body["choices"][0]["message"] and "retrieval" not in body["usage"]["mpic"]


async def test_an_embedder_without_weights_is_reported_and_other_routes_work(tmp_path, template):
    config = Config(retrieval=RetrievalConfig(embedder=str(tmp_path / "nowhere"), embedder_weights="none"))
    async with fake_server(tmp_path / "library", template, config=config) as server:
        assert (await add(server, id=ID)).status_code == 200
        unavailable = (503, "embedder_unavailable")
        assert refusal(await search(server, query="lamp")) == unavailable
        assert refusal(await server.ask("the lamp?", mpic={"retrieval": "always"})) == unavailable
        assert (await server.ask("the lamp?")).status_code == 200


@pytest.mark.parametrize("metadata", ['{"a": "\\ud800"}', '{"\\ud800": 1}', "[" * 100_000, '{"a": '])
async def test_metadata_that_is_not_json_is_refused_and_listings_work(server, metadata):
    answer = await add(server, metadata=metadata)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")
    assert (await server.http.get("/v1/references")).status_code == 200


@pytest.mark.parametrize("field", ["description", "\\ud800"])
async def test_form_fields_that_cannot_be_encoded_are_refused(server, field):
    name = "--X\r\nContent-Disposition: form-data; name="
    body = f'{name}"{field}"\r\n\r\n\\ud800\r\n{name}"file"; filename="a"\r\n\r\nhi\r\n--X--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=X; charset=unicode_escape"}
    answer = await server.http.post("/v1/references", content=body, headers=headers)
    assert refusal(answer) == (400, "bad_request")


async def test_a_file_in_place_of_metadata_is_refused_as_a_second_file(server):
    files = {"file": ("a.txt", b"a"), "metadata": ("m.json", b"{}")}
    answer = await server.http.post("/v1/references", files=files)
    assert refusal(answer) == (400, "bad_request")
    assert "all other fields are texts" in answer.json()["error"]["message"]
