"""The vLLM engine with ``vllm_sharing``, on the demo model and samples."""

from __future__ import annotations

import pytest
import vllm_facade
from vllm_facade import MANIFEST, damage, idle, whole


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with vllm_facade.Bench(tmp_path_factory.mktemp("library"), vllm_sharing=True) as made:
        yield made


@pytest.fixture
def asked(bench, monkeypatch):
    """Lengths of the prompts that vLLM is given, and the orders that come with them."""
    seen, generate = [], bench.engine.client.generate

    def listening(prompt, params):
        order = (params.extra_args.get("kv_transfer_params") or {}).get("mpic", {}).get("link")
        seen.append((len(prompt.ids), order))
        return generate(prompt, params)

    monkeypatch.setattr(bench.engine.client, "generate", listening)
    return seen


@pytest.mark.parametrize("policy", ["mpic-16", "legolink-16", "packet-4"])
def test_shared_links_give_the_native_engines_greedy_answers(bench, native, asked, policy):
    prompts = [bench.prompt(question["messages"]) for question in MANIFEST["questions"]]
    streams = [bench.submit(prompt, policy) for prompt in prompts]
    for question, prompt, stream in zip(MANIFEST["questions"], prompts, streams):
        ours, theirs = stream.result(), bench.ask(prompt, policy, native)
        assert ours.token_ids == theirs.token_ids, question["id"]
        counts = lambda usage: (usage.prompt_tokens, usage.reused, usage.recomputed, usage.prefix_hit)
        assert whole(ours.usage) and counts(ours.usage)[:3] == counts(theirs.usage)[:3]
    links = [(length, order) for length, order in asked if order is not None]
    assert len(links) == len(prompts)
    for length, order in links:
        assert order["shared"] and length == sum(hi - lo for lo, hi in order["rows"]) < order["length"]
    idle(bench)
    assert bench.engine.stats()["pages"]["running"] == 0, "who has ended holds nothing"


def test_a_policy_that_leaves_holes_is_copied_beside_shared_links(bench, native, asked):
    prompt = bench.prompt(MANIFEST["questions"][0]["messages"])
    answers = [bench.submit(prompt, policy) for policy in ("random-30", "mpic-16")]
    for policy, answer in zip(("random-30", "mpic-16"), answers):
        assert answer.result().token_ids == bench.ask(prompt, policy, native).token_ids
    links = [order for _, order in asked if order is not None]
    assert {order.get("shared", False) for order in links} == {True, False}


def test_a_second_turn_finds_its_own_blocks(bench):
    question = MANIFEST["questions"][0]["messages"]
    first = bench.ask(bench.prompt(question), "mpic-16", user="turns")
    turn = [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And the other?"}]
    second = bench.ask(bench.prompt([*question, *turn]), "mpic-16", user="turns")
    assert second.usage.prefix_hit and whole(second.usage)


def test_a_shared_chunk_whose_file_is_damaged_is_compiled_again(bench, native):
    prompt = bench.prompt([{"role": "user", "content": "FILE#VERA What is it about?"}])
    expected = bench.ask(prompt, "legolink-0", native).token_ids
    [chunk] = prompt.chunks
    path = bench.file_of(chunk, vllm_facade.WRAPPINGS[1])
    damage(path)
    answer = bench.ask(prompt, "legolink-0")
    assert answer.token_ids == expected and whole(answer.usage)
    assert bench.counters()["load_failures"]


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 4.0},  # of tokens in chunks, too
        {"presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"logit_bias": ((591, -100.0), (20, 6.0))},  # the first would be the most likely
        {"min_p": 1.0, "temperature": 1.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_penalties_and_biases_change_answers_as_in_the_native_engine(bench, native, asked, changes):
    prompt = bench.prompt(MANIFEST["questions"][0]["messages"])
    settings = {"ignore_eos": True, **changes}
    ours, theirs = bench.ask(prompt, "mpic-16", **settings), bench.ask(prompt, "mpic-16", native, **settings)
    assert ours.token_ids == theirs.token_ids
    plain = bench.ask(prompt, "mpic-16", ignore_eos=True)
    assert (ours.token_ids == plain.token_ids) == ("min_p" in changes), "the best token alone is greedy"


def test_a_search_in_the_middle_of_an_answer_is_refused_where_vllm_would_forget_its_words(bench):
    from mpic.errors import UnsupportedParameter

    request = bench.request(bench.prompt("?"), "mpic-16", retrieval=object(), presence_penalty=1.0)
    with pytest.raises(UnsupportedParameter) as refused:
        bench.engine.submit(request)
    assert refused.value.param == "mpic.retrieval.mode"
