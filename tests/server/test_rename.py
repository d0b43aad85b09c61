"""Files get another handle: prompts find them by the new one, nothing is compiled again."""

import unicodedata

import pytest
from server_helpers import png, refusal

from mpic.handles import canonical


async def test_a_file_is_found_by_its_new_handle_only(server):
    file = await server.uploaded(png(), handle="OLD")
    changed = await server.http.patch(f"/v1/files/{file['id']}", json={"handle": "New.1"})
    assert changed.status_code == 200 and changed.json()["handle"] == "New.1"
    assert changed.json()["expires_at"] == file["expires_at"]
    assert (await server.ask("IMAGE#NEW.1 ?")).status_code == 200
    assert (await server.ask("IMAGE#OLD ?")).json()["usage"]["mpic"]["chunks"] == []
    assert (await server.uploaded(png("blue"), handle="OLD"))["handle"] == "OLD"  # it is free again


async def test_a_handle_that_is_taken_or_impossible_is_refused_and_the_old_one_stays(server):
    one, _ = await server.uploaded(png(), handle="ONE"), await server.uploaded(png("blue"), handle="TWO")
    path = f"/v1/files/{one['id']}"
    assert refusal(await server.http.patch(path, json={"handle": "two"})) == (409, "handle_taken")
    refused = await server.http.patch(path, json={"handle": "THREE", "ttl": 10**12})
    assert refusal(refused) == (400, "bad_request")  # both change, or neither does
    for bad in (
        "",
        "a b",
        "x" * 65,
        "../x",
        ".",
        "..",
        "-",
        "_",
        "-.-",
        "😀",
        "a\u200db",
        "ß" * 33,
        "\u0301",
    ):
        assert refusal(await server.http.patch(path, json={"handle": bad})) == (400, "bad_request"), bad
    assert refusal(await server.http.patch(path, json={})) == (400, "bad_request")
    assert (await server.http.get(path)).json()["handle"] == "ONE"
    own = await server.http.patch(path, json={"handle": "one"})
    assert own.json()["handle"] == "one"


@pytest.mark.parametrize(
    "name", ["图片", "фото", "صورة", "हिन्दी", "e\u0301te\u0301", "straße", "한글", "a" * 64]
)
async def test_names_of_every_script_are_handles_whatever_their_case(server, name):
    file = await server.uploaded(png(), handle=name)
    assert file["handle"] == canonical(name)
    for spelt in (name, name.upper(), name.casefold(), unicodedata.normalize("NFD", name)):
        [chunk] = (await server.ask(f"IMAGE#{spelt}, what?")).json()["usage"]["mpic"]["chunks"]
        assert chunk["label"] == file["handle"]
        assert refusal(await server.upload(png("blue"), handle=spelt)) == (409, "handle_taken")
    assert (await server.ask(f"IMAGE#{name}x")).json()["usage"]["mpic"]["chunks"] == []
    assert (await server.http.get(f"/v1/files/{file['id']}")).json()["handle"] == file["handle"]


async def test_a_new_handle_survives_the_loss_of_the_catalogue(server):
    """The sidecar, from which a lost catalogue is made again, says the new one."""
    file = await server.uploaded(png(), handle="OLD")
    await server.http.patch(f"/v1/files/{file['id']}", json={"handle": "NEW"})
    sidecars = [path.read_text() for path in server.library.root.rglob("*.json") if file["id"] in path.name]
    assert len(sidecars) == 1 and '"NEW"' in sidecars[0] and '"OLD"' not in sidecars[0]


@pytest.mark.parametrize("body", [{"ttl": 60}, {"ttl": 60, "handle": "B"}])
async def test_lifetime_and_handle_change_together_or_alone(server, body):
    file = await server.uploaded(png(), handle="A")
    changed = (await server.http.patch(f"/v1/files/{file['id']}", json=body)).json()
    assert changed["expires_at"] is not None and changed["handle"] == body.get("handle", "A")
