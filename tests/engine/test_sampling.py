"""Drawing for all rows at once gives the tokens of the sequential sampler for all options, logits and batches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_kit import text_chunk
from sampling_reference import SequentialSampler

from mpic.engine.base import Sampling
from mpic.engine.native import sampling
from mpic.engine.native.sampling import Sampler, choose
from mpic.errors import IntegrityError
from mpic.prompt.segments import ChunkSegment, TextSegment

OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1e-45},
    {"temperature": 50.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 2.0, "top_k": 2000},
    {"temperature": 2.0, "top_k": 2000, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 300, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 10**9, "top_p": 0.5},
]


PENALTIES = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7, "temperature": 0.9},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "temperature": 1.1, "top_p": 0.8},
    {"logit_bias": ((2, 4.5), (0, -100.0))},
    {"min_p": 0.2, "temperature": 1.5},
    {"min_p": 0.01, "temperature": 2.0, "top_k": 40, "top_p": 0.9},
    {"min_p": 1.0, "temperature": 1.0},
    {"presence_penalty": -0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.7, "logit_bias": ((1, 3.0),)}
    | {"min_p": 0.05, "temperature": 0.7},
]


def peaked(rows: int, vocabulary: int) -> torch.Tensor:
    return torch.randn(rows, vocabulary) * 5


def flat(rows: int, vocabulary: int) -> torch.Tensor:
    """Return logits of which top-p keeps thousands of tokens."""
    return torch.randn(rows, vocabulary) * 0.5


def with_equals(rows: int, vocabulary: int) -> torch.Tensor:
    """Return logits as from a model in bf16, where many tokens are equally likely."""
    return (torch.randn(rows, vocabulary) * 4).round() / 2


def banned(rows: int, vocabulary: int) -> torch.Tensor:
    out = torch.rand(rows, vocabulary) < 0.6
    out[:, 0] = False
    return torch.randn(rows, vocabulary).masked_fill(out, float("-inf"))


def both(options: list[dict], seed: int = 0) -> tuple[list[SequentialSampler], list[Sampler]]:
    made = [Sampling(**{"seed": seed + i, **one}) for i, one in enumerate(options)]
    return [SequentialSampler(one) for one in made], [Sampler(one) for one in made]


@pytest.mark.parametrize("vocabulary", [3, 300, 6001])
@pytest.mark.parametrize("logits_of", [peaked, flat, with_equals, banned])
def test_a_batch_draws_the_tokens_of_the_sequential_sampler(logits_of, vocabulary):
    torch.manual_seed(vocabulary)
    alone, together = both(OPTIONS * 2)
    for _ in range(12):
        logits = logits_of(len(together), vocabulary)
        expected = [sampler(row)[0] for sampler, row in zip(alone, logits, strict=True)]
        assert [token for token, _ in choose(logits, together)] == expected


@pytest.mark.parametrize("vocabulary", [3, 300, 6001])
@pytest.mark.parametrize("logits_of", [peaked, with_equals, banned])
def test_penalties_biases_and_min_p_are_those_of_transformers_beside_rows_without_any(logits_of, vocabulary):
    torch.manual_seed(vocabulary)
    options = [*PENALTIES, *OPTIONS[:6]]
    prompt = torch.randint(vocabulary, (40,)).tolist()
    alone = [SequentialSampler(Sampling(seed=i, **one), prompt) for i, one in enumerate(options)]
    together = both(options)[1]
    for sampler in together:
        sampler.seen.read([TextSegment(tuple(prompt[:9])), ChunkSegment(text_chunk(prompt[9:]))])
    base, differ = logits_of(len(together), vocabulary), 0
    for _ in range(24):
        logits = base + torch.randn(len(together), vocabulary) * 0.5  # tokens come again and again
        expected = [sampler(row) for sampler, row in zip(alone, logits.clone(), strict=True)]
        kept = logits.clone()
        found = [token for token, _ in choose(logits, together)]
        assert found == [token for token, _ in expected]
        assert torch.equal(logits, kept), "the model's own logits stay"
        differ += sum(int(row.argmax()) != token for row, token in zip(logits[:5:2], found[:5:2]))
        for sampler, token in zip(together, found, strict=True):
            sampler.seen.write(token)
    assert differ, "penalties change greedy answers"


def test_logprobs_are_the_models_own_whatever_is_penalized():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    [(token, logprob)] = choose(logits, both([{"logit_bias": ((2, -100.0),), "logprobs": 1}])[1])
    assert token == 1 and logprob.top[0][0] == 2
    assert logprob.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 1]))


def test_more_tokens_than_the_candidates_are_kept_when_they_have_to_be(monkeypatch):
    torch.manual_seed(1)
    logits = flat(8, 6001)
    again = []
    monkeypatch.setattr(
        sampling, "_nucleus", lambda logits, of, kept=sampling._nucleus: again.append(1) or kept(logits, of)
    )
    alone, together = both([{"temperature": 1.0, "top_p": 0.9}] * 8)
    assert [token for token, _ in choose(logits, together)] == [s(row)[0] for s, row in zip(alone, logits)]
    assert again


def test_top_p_is_a_share_of_all_tokens_that_top_k_keeps_also_when_they_are_more_than_the_candidates():
    torch.manual_seed(8)
    alone, together = both([{"temperature": 1.0, "top_k": 2000, "top_p": 0.95}] * 16)
    logits = torch.randn(16, 32_000)
    assert [token for token, _ in choose(logits, together)] == [s(row)[0] for s, row in zip(alone, logits)]


def test_neither_the_place_in_the_batch_nor_its_other_rows_matter():
    torch.manual_seed(2)
    logits = peaked(len(OPTIONS), 5000)
    whole = [token for token, _ in choose(logits, both(OPTIONS)[1])]
    turned = list(reversed(range(len(OPTIONS))))
    samplers = both(OPTIONS)[1]
    assert [token for token, _ in choose(logits[turned], [samplers[i] for i in turned])] == whole[::-1]
    for i, sampler in enumerate(both(OPTIONS)[1]):
        assert choose(logits[i : i + 1], [sampler])[0][0] == whole[i]


def test_tokens_come_as_often_as_they_are_likely():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0]).log()[None].expand(64, -1)
    samplers = both([{"temperature": 1.0}] * 32 + [{"temperature": 1.0, "top_p": 0.65}] * 32)[1]
    counts = torch.zeros(2, 5)
    for _ in range(100):
        for row, (token, _) in enumerate(choose(logits, samplers)):
            counts[row // 32, token] += 1 / 3200
    assert (counts[0] - torch.tensor([0.1, 0.2, 0.3, 0.4, 0])).abs().max() < 0.03
    assert (counts[1] - torch.tensor([0, 0, 3 / 7, 4 / 7, 0])).abs().max() < 0.03


def test_logprobs_are_the_sequential_ones_for_the_rows_that_ask():
    torch.manual_seed(3)
    options = [{**one, "logprobs": count} for one, count in zip(OPTIONS, [None, 0, 1, 5, 20, 400] * 3)]
    logits = peaked(len(options), 300)
    alone, together = both(options)
    for sampler, row, choice in zip(alone, logits, choose(logits, together), strict=True):
        (token, expected), (got_token, got) = sampler(row), choice
        assert got_token == token and (got is None) == (expected is None)
        if expected is not None:
            assert got.token_id == token and got.logprob == pytest.approx(expected.logprob, abs=1e-5)
            assert [i for i, _ in got.top] == [i for i, _ in expected.top]
            assert [p for _, p in got.top] == pytest.approx([p for _, p in expected.top], abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_spoil_their_own_row_only(bad):
    torch.manual_seed(4)
    options = [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "top_k": 7}] * 2
    logits = peaked(6, 3000)
    expected = [sampler(row)[0] for sampler, row in zip(both(options)[0], logits)]
    logits[:3, 5] = bad
    found = choose(logits, both(options)[1])
    assert all(isinstance(one, IntegrityError) for one in found[:3])
    assert [token for token, _ in found[3:]] == expected[3:]
    logits[:, 5] = float("nan")
    assert isinstance(choose(logits[:1], both([{"temperature": 0.0}])[1])[0], IntegrityError)


def test_logits_that_are_not_numbers_spoil_their_own_row_only_where_the_whole_vocabulary_is_looked_at():
    torch.manual_seed(5)
    logits, options = flat(3, 6001), [{"temperature": 1.0, "top_p": 0.9}] * 3
    alone, together = both(options)
    expected = [sampler(row)[0] for sampler, row in zip(alone, logits)]
    for sampler in together:
        sampler.wide = 2
    logits[0, 5] = float("nan")
    spoiled, *found = choose(logits, together)
    assert isinstance(spoiled, IntegrityError) and [token for token, _ in found] == expected[1:]


def test_a_top_k_beyond_every_vocabulary_keeps_all_tokens():
    torch.manual_seed(6)
    logits = peaked(2, 3000)
    alone, together = both([{"temperature": 1.0}] * 2)
    together[1] = both([{"temperature": 1.0, "top_k": 2**63}], seed=1)[1][0]
    assert [token for token, _ in choose(logits, together)] == [s(row)[0] for s, row in zip(alone, logits)]


def test_an_error_in_the_options_of_one_row_leaves_the_others_their_tokens():
    torch.manual_seed(7)
    logits = peaked(4, 3000)
    alone, together = both(OPTIONS[1:5])
    expected = [sampler(row)[0] for sampler, row in zip(alone, logits)]
    together[2] = both([{"temperature": 1.0, "logprobs": "many"}])[1][0]
    found = choose(logits, together)
    assert isinstance(found.pop(2), TypeError)
    assert [token for token, _ in found] == [expected[row] for row in (0, 1, 3)]


def test_tokens_are_waited_for_on_their_own_device_which_need_not_be_the_current_one(monkeypatch):
    """A fake of ``torch.cuda`` records its calls in order. An event of another device's stream would be over at once,
    and the numbers that are read would be those of the step before."""
    said = []

    class Event:
        def record(self, stream="the current device's stream"):
            said.append(f"recorded on {stream}")

        def synchronize(self):
            said.append("waited")

    host = SimpleNamespace(copy_=lambda source, non_blocking: said.append("copied"), tolist=lambda: [4, 2])
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: host)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"the stream of {device}")
    tokens = SimpleNamespace(device=torch.device("cuda:1"), shape=(2,), dtype=torch.int64)
    read = sampling._fetch(tokens)
    assert said == ["copied", "recorded on the stream of cuda:1"]
    assert read() == [4, 2] and said[2:] == ["waited"]
