"""The savings ledger: tokens that were not computed, by user and day, and files that were never reused."""

from dataclasses import replace

import pytest
from fake_engine import CHUNK_TOKENS, FakeEngine
from server_helpers import data_url, events, fake_server, png, real_server, refusal
from small_models import SMALL

from mpic.engine.base import ChunkUse, GenerationUsage
from mpic.errors import DatabaseDamaged
from mpic.library.copies.backup import backup
from mpic.library.copies.restore import restore
from mpic.server.savings import CHUNKS_KEPT, DAYS_KEPT, SavingsLedger

DAY = 86_400
USED = ChunkUse("image:abc", "A", 64, 48, 16, "device")
ANSWER = GenerationUsage(
    prompt_tokens=100,
    reused=48,
    recomputed=16,
    prefix_hit=2,
    computed=50,
    link_ms=50.0,
    ttft_ms=60.0,
    chunks=(USED,),
)


@pytest.fixture
def clock():
    return [1_800_000_000.0]


@pytest.fixture
def ledger(tmp_path, clock):
    return SavingsLedger(tmp_path, "model", lambda: clock[0])


def test_tokens_are_counted_for_each_user_and_day(ledger, clock):
    for user in ("ann", "ann", "bob"):
        ledger.answered(user, ANSWER)
    clock[0] += DAY
    ledger.answered("ann", replace(ANSWER, ttft_ms=0.0))  # it ended before its first token
    ledger.answered("bob", ANSWER)
    assert [row[1:] for row in ledger.days("ann", "")] == [(2, 200, 100)]
    assert [row[1:] for row in ledger.days(None, "")] == [(3, 300, 150), (1, 100, 50)]
    assert ledger.users("") == [("ann", 2, 200, 100), ("bob", 2, 200, 100)]
    today = ledger.days(None, "")[-1][0]
    assert ledger.users(today) == [("bob", 1, 100, 50)]
    assert ledger.begun() == clock[0]  # when it was first written


def test_uses_of_chunks_are_counted_and_compiling_one_is_no_reuse(ledger, clock):
    ledger.answered("ann", ANSWER)
    ledger.answered("ann", replace(ANSWER, chunks=(replace(USED, tier="compiled"), replace(USED, reused=0))))
    ledger.answered("bob", ANSWER)
    assert ledger.uses("ann")["image:abc"] == (1, 48, clock[0])
    assert ledger.uses(None)["image:abc"] == (2, 96, clock[0]) and ledger.uses("eve") == {}


def test_what_was_counted_is_there_after_a_restart(ledger, tmp_path, clock):
    ledger.answered("ann", ANSWER)
    ledger.flush()
    again = SavingsLedger(tmp_path, "model", lambda: clock[0])
    again.answered("ann", ANSWER)
    assert [row[1:] for row in again.days("ann", "")] == [(2, 200, 100)]
    assert again.uses("ann")["image:abc"].uses == 2


def test_the_price_of_a_token_is_the_slope_of_times_over_computed_tokens(ledger):
    assert ledger.ms_per_token() is None
    for _ in range(10):
        ledger.answered("ann", ANSWER)
    assert ledger.ms_per_token() is None  # all alike: they do not tell
    for computed in (100, 200, 400):
        ledger.answered("ann", replace(ANSWER, computed=computed, link_ms=25.0 + 0.5 * computed))
    assert ledger.ms_per_token() == pytest.approx(0.5)


def test_a_ledger_that_cannot_be_written_keeps_what_it_counted(ledger, tmp_path):
    ledger.path.write_bytes(b"not a database" * 100)
    ledger.answered("ann", ANSWER)
    with pytest.raises(DatabaseDamaged, match="savings"):
        ledger.flush()
    ledger.answered("ann", ANSWER)
    ledger.path.unlink()
    assert [row[1:] for row in ledger.days("ann", "")] == [(2, 200, 100)]
    assert ledger.uses("ann")["image:abc"].uses == 2


def test_old_days_and_the_chunks_used_longest_ago_are_forgotten(ledger, clock, monkeypatch):
    assert CHUNKS_KEPT > 1000
    monkeypatch.setattr("mpic.server.savings.CHUNKS_KEPT", 2)
    for key in ("a", "b", "c"):
        ledger.answered("ann", replace(ANSWER, chunks=(replace(USED, key=key),)))
        clock[0] += 1
    assert ledger.uses("ann").keys() == {"b", "c"}
    clock[0] += (DAYS_KEPT + 1) * DAY
    ledger.answered("ann", ANSWER)
    assert [row[1:] for row in ledger.days("ann", "")] == [(1, 100, 50)]


async def test_the_api_shows_what_was_saved_and_what_was_never_reused(server):
    used = await server.uploaded(png("red"), handle="USED")
    idle = await server.uploaded(png("blue"), handle="IDLE")
    for stream in (False, True):
        assert (await server.ask("IMAGE#USED what?", stream=stream)).status_code == 200
    found = (await server.http.get("/v1/savings")).json()
    assert found["total"]["answers"] == 2 and found["total"]["saved_tokens"] == 2 * (CHUNK_TOKENS - 16)
    assert [day["answers"] for day in found["days"]] == [2] and found["users"] == []
    items = {item["name"]: item for item in found["items"]}
    assert items["USED"]["uses"] == 2 and items["USED"]["id"] == used["id"]
    assert items["IDLE"]["uses"] == 0
    assert items["IDLE"]["last_used"] is None
    assert items["IDLE"]["id"] == idle["id"]
    assert found["items"][0]["name"] == "IDLE"  # the least reused first
    everyone = (await server.http.get("/v1/savings?scope=all&days=7")).json()
    assert [user["user"] for user in everyone["users"]] == ["local"] and everyone["items"] == []


COUNTED = ["full", "prefix", "reuse", "mpic-4", "legolink-4", "legolink-0", "block-4"]


async def test_what_a_request_compiles_is_neither_cached_nor_saved_by_it(tmp_path):
    """Under each policy: once cold, once warm, with one answer and with three, whole and streamed."""
    async with real_server(tmp_path, SMALL, pool_bytes=1 << 27) as server:
        ledger, counters = server.app.state.mpic.savings, server.engine.stats

        async def asked(parts, policy, n, stream):
            fields = {"stream_options": {"include_usage": True}} if stream else {}
            sampled = {"n": n, "temperature": 1.0} if n > 1 else {}
            fields |= {"max_tokens": 2, "stream": stream, "mpic": {"policy": policy}, **sampled}
            before = ledger.days(None, "") or [(0, 0, 0, 0)]
            answer = await server.ask(parts, **fields)
            assert answer.status_code == 200, answer.text
            usage = events(answer.text)[0][-1]["usage"] if stream else answer.json()["usage"]
            after = ledger.days(None, "")
            answers, prompt, saved = (new - old for new, old in zip(after[0][1:], before[0][1:], strict=True))
            assert (answers, prompt) == (n, usage["prompt_tokens"])
            cached, tokens = usage["prompt_tokens_details"]["cached_tokens"], usage["mpic"]["tokens"]
            assert (
                cached
                == tokens["reused"] + tokens["prefix_hit"]
                == usage["prompt_tokens"] - tokens["computed"]
            )
            assert saved == cached
            return tokens, usage["mpic"]["chunks"]

        for number, policy in enumerate(COUNTED):
            for n, stream in ((1, False), (1, True), (3, False), (3, True)):
                colour = (20 * number + 1, 60 * n, 100 * stream)
                parts = [
                    {"type": "text", "text": f"{policy} {n} {stream}"},
                    {"type": "image_url", "image_url": {"url": data_url(png(colour))}},
                    {"type": "document", "text": f"{policy} {n} {stream} Vera works in Rome. " * 6},
                    {"type": "text", "text": "Where?"},
                ]
                old = counters()["counters"]
                tokens, _ = await asked(parts, policy, n, stream)
                assert tokens["reused"] == 0
                new = counters()["counters"]
                change = {name: new[name] - old.get(name, 0) for name in new if name.startswith("tokens_")}
                assert change["tokens_requested"] == sum(
                    change[f"tokens_{name}"] for name in ("reused", "prefix_hit", "computed")
                )
                if policy not in ("full", "prefix"):
                    assert tokens["compiled"] > 0
                if n == 1:  # the others of several answers find what the first has compiled
                    assert change["tokens_reused"] == 0
                tokens, chunks = await asked(
                    [*parts[:-1], {"type": "text", "text": "When?"}], policy, n, stream
                )
                assert tokens["compiled"] == 0
                assert tokens["reused"] == sum(chunk["reused"] for chunk in chunks)


async def test_savings_of_one_user_are_not_shown_to_another(server):
    ann, bob, root = server.key("ann"), server.key("bob"), server.key("root", "admin")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert (await server.http.post("/v1/chat/completions", json=body, headers=ann)).status_code == 200
    get = server.http.get
    assert (await get("/v1/savings", headers=ann)).json()["total"]["answers"] == 1
    assert (await get("/v1/savings", headers=bob)).json()["total"]["answers"] == 0
    assert refusal(await get("/v1/savings?scope=all", headers=bob)) == (403, "forbidden")
    assert (await get("/v1/savings?scope=all", headers=root)).json()["users"][0]["user"] == "ann"


async def test_no_figure_of_savings_tells_a_user_about_others(server):
    """Neither since when others ask, nor how long their answers take."""
    ann, bob, root = server.key("ann"), server.key("bob"), server.key("root", "admin")

    async def savings(key, scope="mine"):
        return (await server.http.get(f"/v1/savings?scope={scope}", headers=key)).json()

    before = await savings(bob)
    for computed in (100, 200, 400, 800, 1600, 3200):
        usage = replace(ANSWER, computed=computed, link_ms=25.0 + 0.5 * computed)
        server.app.state.mpic.savings.answered("ann", usage)
    assert await savings(bob) == before and before["since"] is None and before["ms_per_token"] is None
    own, every = await savings(ann), await savings(root, "all")
    assert own["ms_per_token"] == every["ms_per_token"] == pytest.approx(0.5)
    assert every["since"] - DAY < own["since"] <= every["since"] and own["since"] % DAY == 0
    assert (await savings(root))["ms_per_token"] is None


async def test_the_ledger_is_part_of_a_backup(server, tmp_path_factory):
    target, root = tmp_path_factory.mktemp("backup"), tmp_path_factory.mktemp("restored")
    server.app.state.mpic.savings.answered("ann", ANSWER)
    server.app.state.mpic.savings.flush()
    backup(server.library.root, target)
    restore(target, root)
    assert [row[1:] for row in SavingsLedger(root, "model").days("ann", "")] == [(1, 100, 50)]


async def test_a_document_that_is_cut_is_reused_when_its_pieces_are(tmp_path, template):
    async with fake_server(tmp_path, template, FakeEngine(context=10**5, pool=10**6)) as server:
        split = '{"mode": "fixed", "tokens": 10}'
        for name in ("USED", "IDLE"):
            text = "".join(f"{name} {i:03}; " for i in range(6)).encode()
            await server.uploaded(text, f"{name}.txt", handle=name, split=split)
        for _ in range(2):
            assert (await server.ask("FILE#USED what?")).status_code == 200
        items = {item["name"]: item for item in (await server.http.get("/v1/savings")).json()["items"]}
        pieces = len(server.engine.requests[-1].prompt.chunks)
        assert pieces > 2
        assert (items["USED"]["uses"], items["USED"]["saved_tokens"]) == (2, 2 * pieces * (CHUNK_TOKENS - 16))
        assert items["USED"]["last_used"] is not None
        assert (items["IDLE"]["uses"], items["IDLE"]["saved_tokens"]) == (0, 0)


async def test_the_api_says_when_it_leaves_newer_files_out(server, monkeypatch):
    monkeypatch.setattr("mpic.server.routers.savings.ITEMS", 2)
    for handle, more in (("A", False), ("B", False), ("C", True)):
        await server.upload(png(), handle=handle)
        found = (await server.http.get("/v1/savings")).json()
        assert found["more_items"] is more
    assert [item["name"] for item in found["items"]] == ["A", "B"]
