"""The metrics that Prometheus reads."""

from unittest.mock import AsyncMock, Mock

import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import fake_server, refusal

from mpic.errors import DatabaseBusy
from mpic.server.metrics import ResponseCounter


async def scrape(http, **options):
    answer = await http.get("/metrics", **options)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return {
        (s.name, *s.labels.values()): s.value
        for family in text_string_to_metric_families(answer.text)
        for s in family.samples
    }


async def test_times_of_answers_and_statuses(server):
    before = await scrape(server.http)
    assert before["mpic_time_to_first_token_seconds_count",] == 0
    await server.ask("hello")
    await server.ask("hello", stream=True)
    await server.ask([{"type": "image", "handle": "NOBODY"}])
    after = await scrape(server.http)
    assert after["mpic_time_to_first_token_seconds_count",] == 2
    assert after["mpic_time_to_first_token_seconds_sum",] == pytest.approx(2 * 1.25e-3)
    assert after["mpic_http_responses_total", "200"] >= 3 and after["mpic_http_responses_total", "404"] == 1
    assert after["mpic_tier_budget", "disk"] > 0


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("a bug"), 500), (MemoryError(), 503), (DatabaseBusy("locked"), 503)]
)
async def test_a_request_that_ends_in_an_exception_counts_as_it_is_answered(server, error, status):
    server.engine.presses = Mock(side_effect=error)
    assert (await server.upload(press="snapkv-50")).status_code == status
    shown = await scrape(server.http)
    assert (
        shown["mpic_http_responses_total", str(status)] == 1
        and ("mpic_http_responses_total", "200") not in shown
    )


async def test_an_answer_that_breaks_off_after_its_status_counts_once(server):
    async def broken(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("a bug")

    metrics = server.app.state.mpic.metrics
    with pytest.raises(RuntimeError):
        await ResponseCounter(broken, metrics)({"type": "http"}, AsyncMock(), AsyncMock())
    shown = await scrape(server.http)
    assert [(labels[1], n) for labels, n in shown.items() if labels[0] == "mpic_http_responses_total"] == [
        ("200", 1)
    ]


async def test_tokens_tiers_and_pages(tmp_path, template):
    engine = FakeEngine()
    engine.stats = lambda: {
        "waiting": 2,
        "running": 3,
        "pages": {"total": 10, "free": 4, "chunks": 3, "prefix": 2, "running": 1, "page_bytes": 100},
        "chunks_resident": 2,
        "counters": {"tokens_reused": 70, "tokens_requested": 100, "chunk_requests": 5, "chunk_hits": 4}
        | {"evicted_chunks": 1, "finished_stop": 9, "failed": 1},
    }
    async with fake_server(tmp_path, template, engine) as server:
        shown = await scrape(server.http)
    assert shown["mpic_prompt_tokens_total", "reused"] == 70
    assert shown["mpic_tier_hits_total", "device"] == 4 and shown["mpic_tier_requested_total", "device"] == 5
    assert shown["mpic_tier_bytes", "device"] == 300
    assert shown["mpic_evictions_total", "room", "device"] == 1
    assert [shown["mpic_pages", s] for s in ("free", "chunks", "prefix", "running")] == [4, 3, 2, 1]
    assert shown["mpic_requests_total", "stop"] == 9 and shown["mpic_requests_waiting",] == 2


async def test_with_keys_it_needs_an_admin(server):
    assert refusal(await server.http.get("/metrics", headers=server.key())) == (403, "forbidden")
    assert await scrape(server.http, headers=server.key("root", "admin"))
