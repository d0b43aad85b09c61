"""Users take turns: whatever one of them does, another's first token is at most two steps later than alone."""

from collections import Counter
from contextlib import suppress

import pytest
from engine_kit import ids, pause, prompt_of, request_of, submit_together, text_chunk, until

from mpic.engine.native.pace import LEAST
from mpic.engine.native.turns import Turns
from mpic.errors import QueueFull
from mpic.server.parallel_sampling import ParallelSampling


def watch(engine) -> dict[str, list[int]]:
    """Return, by request, the step before which it came to the engine and those in which it was given a token. It
    grows as the engine runs."""
    seen, arrive, take = {}, engine._arrive, engine.outputs.take

    def arrived(request):
        seen[request.spec.id] = [engine._counters["steps"]]
        arrive(request)

    def taken(request, choice, now):
        seen[request.spec.id].append(engine._counters["steps"])
        take(request, choice, now)

    engine._arrive, engine.outputs.take = arrived, taken
    return seen


def steps_to_first_token(engine, seen, request) -> int:
    engine.submit(request).result()
    arrived, first, *_ = seen[request.id]
    return first - arrived


def streams(engine):
    return [engine.submit(request_of(prompt_of(ids(i, 12)), "full", 300, "a")) for i in range(80)]


def several_answers(engine):
    """24 requests for 16 answers each, of which as many are refused as do not fit the queue."""
    started = []
    for i in range(24):
        request = request_of(prompt_of(ids(i, 12)), "full", 300, "a", temperature=1.0)
        with suppress(QueueFull):
            started += ParallelSampling.submit(engine.submit, [request], 16).streams
    return started


def fresh_prompts(engine):
    return [engine.submit(request_of(prompt_of(ids(i, 700)), "full", 40, "a")) for i in range(100)]


def fresh_chunks(engine):
    prompts = [prompt_of(ids(i, 5), text_chunk(ids(900 + i, 500), "a"), ids(i, 3)) for i in range(60)]
    return [engine.submit(request_of(prompt, "mpic-4", 40, "a")) for prompt in prompts]


def one_long_prompt(engine):
    return [engine.submit(request_of(prompt_of(ids(1, 1900)), "full", 20, "a"))]


def uploads(engine):
    for i in range(60):
        engine.compile(text_chunk(ids(900 + i, 700), "a"))
    return []


FLOODS = (streams, several_answers, fresh_prompts, fresh_chunks, one_long_prompt, uploads)
ASKED = {
    "a line": prompt_of(ids(500, 9)),
    "three steps": prompt_of(ids(501, 700)),
    "a new chunk": prompt_of(ids(502, 5), text_chunk(ids(503, 300), "b"), ids(504, 3)),
}


@pytest.mark.parametrize("pages", [4000, 300], ids=["much memory", "little memory"])
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("flood", FLOODS)
def test_whatever_one_user_does_anothers_first_token_is_at_most_two_steps_late(
    make_engine, flood, asked, pages
):
    policy = "full" if not ASKED[asked].chunks else "mpic-4"
    # so few rows a step that streams beside them (``StepPace``) never make them fewer
    settings = {"pages": pages, "budget": LEAST, "max_running": 16, "max_waiting": 100}
    alone = make_engine(**settings)
    baseline = steps_to_first_token(alone, watch(alone), request_of(ASKED[asked], policy, 16, "b"))
    engine = make_engine(**settings)
    seen = watch(engine)
    flooded = flood_of(engine, flood)
    until(lambda: engine._counters["steps"] >= 2)
    for _ in range(3 if asked == "a line" else 1):  # as long as he has had less than the other
        found = steps_to_first_token(engine, seen, request_of(ASKED[asked], policy, 16, "b"))
        assert found <= baseline + 2
    for stream in flooded:
        stream.abort()


def flood_of(engine, flood):
    """Start a flood, of which the engine sees everything at once."""
    go = pause(engine)
    flooded = flood(engine)
    go.set()
    return flooded


def test_a_user_who_has_the_whole_pool_in_one_request_gives_it_back_and_both_end(make_engine):
    engine = make_engine(pages=240, max_running=4, budget=LEAST)
    seen = watch(engine)
    giant = engine.submit(request_of(prompt_of(ids(1, 1700)), "full", 200, "a"))
    until(lambda: engine._counters["steps"] >= 3)
    small = request_of(prompt_of(ids(2, 300)), "full", 8, "b")
    assert steps_to_first_token(engine, seen, small) <= 4
    assert len(giant.result().token_ids) == 200


def test_everybody_is_answered_as_alone_while_users_take_places_and_pages_from_each_other(make_engine):
    """Each user floods as he likes; whoever is preempted goes on where he was."""
    chunk = {user: text_chunk(ids(ord(user), 40), user) for user in "abcd"}
    asked = [
        request_of(
            prompt_of(ids(i, 20), chunk[user], ids(50 + i, 9)),
            "mpic-4",
            tokens,
            user,
            temperature=1.0,
            seed=i,
        )
        for user, n, tokens in (("a", 14, 60), ("b", 3, 90), ("c", 1, 200), ("d", 6, 20))
        for i in range(n)
    ]
    alone = make_engine()
    expected = [alone.submit(request).result().token_ids for request in asked]
    engine = make_engine(pages=60, max_running=5)
    streams = [engine.submit(request) for request in asked if request.user == "a"]
    until(lambda: len(engine.scheduler.running) > 1)
    go = pause(engine)
    streams += [engine.submit(request) for request in asked if request.user != "a"]
    go.set()
    results = [stream.result() for stream in streams]
    assert [result.token_ids for result in results] == expected
    assert sum(result.usage.preemptions for result in results) > 0
    assert not engine.scheduler.turns._shares


@pytest.mark.parametrize("places", [1, 2])
def test_more_users_than_places_have_them_in_turn(make_engine, monkeypatch, places):
    """While all want more, none has had more than another by much more than the slice that a place is kept for."""
    monkeypatch.setattr("mpic.engine.native.turns.SLICE", 16)
    engine = make_engine(max_running=places)
    users = "abcde"
    seen = watch(engine)
    asked = [
        request_of(prompt_of(ids(i, 8)), "full", 150, user)
        for user in users
        for i in range(1 + 2 * (user == "a"))
    ]
    streams = submit_together(engine, asked)
    lag, take = [], engine.outputs.take

    def taken(request, choice, now):
        take(request, choice, now)
        had = Counter({user: 0 for user in users})
        for one in asked:
            had[one.user] += len(seen[one.id]) - 1
        if all(had[user] < 150 for user in users):
            lag.append(max(had.values()) - min(had.values()))

    engine.outputs.take = taken
    assert [len(stream.result().token_ids) for stream in streams] == [150] * len(asked)
    assert max(lag) <= 2 * 16 + 8


def test_one_user_alone_has_every_place_and_is_answered_in_order(make_engine):
    engine = make_engine(max_running=4)
    seen = watch(engine)
    asked = [request_of(prompt_of(ids(i, 8)), "full", 12, "a") for i in range(12)]
    results = [stream.result() for stream in submit_together(engine, asked)]
    firsts = [seen[request.id][1] for request in asked]
    assert firsts == sorted(firsts) and Counter(firsts) == dict.fromkeys(firsts, 4)
    assert engine._counters["steps"] == 3 * 12
    assert not any(result.usage.preemptions for result in results)


def test_uploads_are_compiled_while_another_user_asks_without_end(make_engine, monkeypatch):
    engine = make_engine(max_running=2, budget=64)
    compiled, made = engine.memory.compiled, []
    monkeypatch.setattr(
        engine.memory, "compiled", lambda job: (made.append(engine._counters["steps"]), compiled(job))
    )
    asked = [request_of(prompt_of(ids(i, 400)), "full", 10, "a") for i in range(40)]
    go = pause(engine)
    upload = engine.compile(text_chunk(ids(900, 300), "b"))  # 5 steps alone
    until(lambda: engine._inbox)
    streams = [engine.submit(request) for request in asked]
    go.set()
    assert not any(stream.result().usage.preemptions for stream in streams)
    assert upload.result(60) == 300 and made[0] <= 12


def test_a_request_that_does_not_fit_holds_up_only_its_own_user(make_engine):
    engine = make_engine(pages=64)
    seen = watch(engine)
    held = engine.submit(request_of(prompt_of(ids(1, 8)), "full", 150, "c"))
    next(iter(held))
    go = pause(engine)
    blocked = [engine.submit(request_of(prompt_of(ids(2, 400)), "full", 8, "a")) for _ in range(2)]
    passing = engine.submit(request_of(prompt_of(ids(3, 8)), "full", 4, "b"))
    go.set()
    assert {stream.result().finish_reason for stream in [passing, held, *blocked]} == {"length"}
    assert seen[passing.id][-1] - seen[passing.id][0] == 4


def test_rows_of_a_step_level_what_users_have_had():
    turns = Turns(places=4, pages=100)

    def given(budget, wanted, had):
        for user, rows in had.items():
            turns._share(user).rows = rows
        return turns.level(wanted, budget)

    assert given(100, {"a": 500}, {"a": 0}) == {"a": 500}  # alone: the budget is all that limits him
    assert given(100, {"a": 90, "b": 90}, {"a": 70, "b": 70}) == {"a": 50, "b": 50}
    assert given(100, {"a": 90, "b": 10}, {"a": 70, "b": 70}) == {"a": 90, "b": 10}
    assert given(100, {"a": 500, "b": 500}, {"a": 40, "b": 0}) == {"b": 70, "a": 30}
    assert given(100, {"a": 500, "b": 500}, {"a": 900, "b": 0}) == {"b": 88, "a": 12}  # an eighth in any case
    assert given(1, {"a": 5, "b": 5, "c": 5}, {"a": 2, "b": 1, "c": 1}) == {"b": 1, "c": 0, "a": 0}


def test_a_full_queue_refuses_whoever_has_filled_it_and_nobody_else(make_engine):
    engine = make_engine(max_running=2, max_waiting=6)
    running = [engine.submit(request_of(prompt_of(ids(i, 8)), "full", 1500, "a")) for i in range(2)]
    for stream in running:
        next(iter(stream))
    waiting = []

    def submitted(user):
        try:
            waiting.append(engine.submit(request_of(prompt_of(ids(9, 1200)), "full", 700, user)))
        except QueueFull as error:
            return error.details["waiting"]
        return None

    go = pause(engine)
    assert [submitted("a") for _ in range(8)][-1] == 6
    assert [submitted("b") for _ in range(4)] == [None, None, None, 3]
    assert [submitted("c") for _ in range(3)] == [None, None, 2]
    go.set()
    for stream in [*running, *waiting]:
        stream.abort()
