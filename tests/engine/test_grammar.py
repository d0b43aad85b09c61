"""Answers with a grammar follow it whatever the weights say, and the others in the batch do not notice."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
import torch
from engine_kit import family, ids, pause, prompt_of, request_of, submit_together, text_chunk
from server_helpers import byte_tokenizer

from mpic.engine.base import Sampling
from mpic.engine.grammar import FEW, Constraints, Grammar, limits
from mpic.engine.native import sampling
from mpic.engine.native.cuda_executor import CudaExecutor
from mpic.engine.native.sampling import Drawing, Sampler
from mpic.errors import GrammarTooComplex, IntegrityError, InvalidGrammar, UnsupportedParameter
from mpic.model.loaded import LoadedModel

DOCUMENT = text_chunk(ids(70, 40))
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["cat", "dog", None]},
        "code": {"type": "string", "pattern": "^[A-F]{2}-[0-9]{3}$"},
        "scores": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["ok", "kind", "code", "scores"],
    "additionalProperties": False,
}


def of_schema(schema, param="response_format"):
    lark = "start: %json " + json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
    return Grammar(lark, ((param, lark),))


def of_regex(regex, param="structured_outputs.regex"):
    return Grammar(f"start: /{regex}/", ((param, f"start: /{regex}/"),))


@pytest.fixture(autouse=True)
def tokens(monkeypatch):
    """A token is a byte, as in the tests of the server."""
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(family("llama").loaded, "tokenizer", tokenizer)
    monkeypatch.setattr(LoadedModel, "eos_ids", frozenset({tokenizer.eos_token_id}))
    return tokenizer


def asked(grammar, tokens=120, seed=None, temperature=0.0, prompt=None, **options):
    prompt = prompt or prompt_of(ids(1, 5), DOCUMENT, ids(2, 4))
    request = request_of(prompt, "mpic-4", tokens)
    settings = Sampling(max_tokens=tokens, temperature=temperature, seed=seed, **options)
    return replace(request, sampling=settings, grammar=grammar)


def answers(engine, requests):
    found = [stream.result() for stream in submit_together(engine, requests)]
    engine.check()
    return found


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 40, "top_p": 0.9}])
def test_random_weights_give_json_of_a_finite_schema(make_engine, options):
    requests = [asked(of_schema(SCHEMA), seed=i, temperature=1.5 * (i > 0), **options) for i in range(4)]
    for answer in answers(make_engine(), requests):
        jsonschema.validate(json.loads(answer.text), SCHEMA)
        assert answer.finish_reason == "stop" and answer.usage.completion_tokens == len(answer.text)


def test_requests_with_and_without_grammars_share_a_batch(make_engine):
    free = [asked(None, 12, prompt=prompt_of(ids(n, 9)), temperature=1.0, seed=n) for n in (3, 4)]
    alone = answers(make_engine(), free)
    mixed = [asked(of_regex("(ab){3}")), free[0], asked(of_schema(SCHEMA)), free[1], asked(of_regex("x|yes"))]
    engine = make_engine()
    first, plain, second, other, third = answers(engine, mixed)
    assert first.text == "ababab" and third.text in ("x", "yes")
    jsonschema.validate(json.loads(second.text), SCHEMA)
    assert [(a.text, a.token_ids) for a in (plain, other)] == [(a.text, a.token_ids) for a in alone]


def test_many_answers_in_forms_are_masked_together(make_engine):
    """By several threads where they are more than a few."""
    words = [f"{n}!" * n for n in range(1, FEW + 4)]
    forms = [asked(of_regex(word)) for word in words]
    assert [a.text for a in answers(make_engine(), forms)] == words


def test_an_answer_without_a_grammar_makes_no_mask(make_engine, monkeypatch):
    masked = []
    monkeypatch.setattr(sampling, "_masked", lambda *args: masked.append(args))
    engine = make_engine()
    answers(engine, [asked(None, 6)])
    assert not masked and engine.builder.constraints._tokenizer is None


def test_max_tokens_and_stop_end_an_answer_within_its_form(make_engine):
    engine = make_engine()
    [cut] = answers(engine, [asked(of_regex("a{20}"), 7)])
    assert (cut.text, cut.finish_reason) == ("a" * 7, "length")
    [full] = answers(engine, [asked(of_regex("a{7}"), 7)])
    assert (full.text, full.finish_reason) == ("a" * 7, "stop")
    [stopped] = answers(engine, [asked(of_regex("abcdef"), stop=("cd",))])
    assert (stopped.text, stopped.finish_reason) == ("ab", "stop")


def test_log_probabilities_are_the_model_s_own(make_engine):
    """As those of a free answer with the same first token would be."""
    engine = make_engine()
    [free] = answers(engine, [asked(None, 1, logprobs=20)])
    [answer] = answers(engine, [asked(of_regex("ab"), logprobs=20)])
    assert answer.text == "ab" and len(answer.logprobs) == 2
    own, plain = (dict(one.logprobs[0].top) for one in (answer, free))
    assert own == pytest.approx(plain, abs=1e-4)
    assert answer.logprobs[0].logprob < free.logprobs[0].logprob


def test_a_preempted_answer_goes_on_in_its_form(make_engine):
    engine = make_engine()
    [whole] = answers(engine, [asked(of_schema(SCHEMA), temperature=1.0, seed=5)])
    resume = pause(engine)
    stream = engine.submit(asked(of_schema(SCHEMA), temperature=1.0, seed=5))
    interrupted = []

    def interrupt():
        """Preempt the request once, between two steps, in the middle of its answer."""
        [request] = engine.scheduler.running or [None]
        if request is not None and request.generated >= 5:
            engine.scheduler.preempt(request)
            interrupted.append(request.generated)
        elif not interrupted:
            engine._post(interrupt)

    engine._post(interrupt)
    resume.set()
    answer = stream.result()
    assert interrupted and answer.usage.preemptions == 1
    assert answer.text == whole.text and json.loads(answer.text)


def test_steps_ahead_draw_with_the_mask_of_the_last_token(make_engine, monkeypatch):
    """The forward runs ahead; an engine that goes ahead gives the answers of one that does not."""
    monkeypatch.setattr(CudaExecutor, "reuses_logits", True)
    requests = [asked(of_schema(SCHEMA), seed=i, temperature=1.0 * (i > 0)) for i in range(3)]
    requests.append(asked(of_schema(SCHEMA), top_k=3, temperature=1.0, seed=9))
    behind = make_engine(ahead=False)
    ahead = make_engine(ahead=True)
    expected = [(a.text, a.finish_reason) for a in answers(behind, requests)]
    assert [(a.text, a.finish_reason) for a in answers(ahead, requests)] == expected
    assert ahead.stats()["counters"]["steps_ahead"] > 10
    assert behind.stats()["counters"].get("steps_ahead", 0) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 2000}])
@pytest.mark.parametrize("width", [300, 3000])
def test_a_mask_leaves_only_what_it_allows(width, truncation, temperature):
    """And does so where the candidates are more than the tokens that it leaves."""
    generator = np.random.default_rng(width)
    allowed = np.zeros((6, -(-width // 32) * 32), bool)
    for row in allowed:
        row[generator.choice(width, 5, replace=False)] = True
    allowed[4] = True
    words = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))
    logits = torch.from_numpy(generator.normal(size=(6, width)).astype(np.float32))
    before = logits.clone()
    for seed in range(8):
        samplers = [Sampler(Sampling(temperature=temperature, seed=seed, **truncation)) for _ in range(6)]
        drawing = Drawing(logits, samplers, words)
        for row, (token, _) in enumerate(drawing.choices()):
            assert allowed[row, token]
        assert truncation.get("top_k") != 3 or not samplers[0].wide  # never drawn again from all tokens
    assert torch.equal(logits, before)


def test_only_the_request_whose_token_is_not_allowed_fails(make_engine, monkeypatch):
    """The model may give every allowed token no probability at all."""
    engine = make_engine()
    monkeypatch.setattr(sampling, "_masked", lambda logits, mask: torch.full_like(logits, -torch.inf))
    bad = engine.submit(asked(of_regex("b")))
    with pytest.raises(IntegrityError, match="does not allow"):
        bad.result()
    monkeypatch.undo()
    assert not engine.stats()["running"]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (of_regex("(a"), "unclosed group"),
        (of_regex("(?=a)b"), "look-around"),
        (of_schema({"type": "strin"}), "Invalid type: strin"),
        (of_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (of_schema({"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisfiable"),
        (of_schema({"$ref": "http://localhost/x"}), "not present"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_field(make_engine, grammar, message):
    fine = of_regex("a")
    both = Grammar(f"start: {grammar.lark[7:]}", (fine.parts[0], ("tools[1]", grammar.lark)))
    with pytest.raises(InvalidGrammar, match=message) as refused:
        make_engine().submit(asked(both))
    assert refused.value.param == "tools[1]" and "\n" not in refused.value.message


def test_an_answer_whose_grammar_takes_too_much_work_ends_with_an_error(make_engine):
    wide = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2500)}}
    engine = make_engine()
    for later in (of_schema(wide), of_regex("(a|b)c{100000000}")):  # what the first token opens is too much
        with pytest.raises(GrammarTooComplex, match="too much work"):
            engine.submit(asked(later, 1000)).result()
    assert limits().max_lexer_states <= 20_000


def test_options_that_a_form_excludes_are_refused_by_name(make_engine):
    engine = make_engine()
    request = asked(of_regex("a"), ignore_eos=True)
    with pytest.raises(UnsupportedParameter) as refused:
        engine.submit(request)
    assert refused.value.param == "mpic.ignore_eos"


def test_a_tokenizer_that_llguidance_does_not_read_is_named():
    constraints = Constraints(SimpleNamespace(__len__=lambda: 3), [1], 3)
    with pytest.raises(UnsupportedParameter, match="tokenizer") as refused:
        constraints.begin(of_regex("a"))
    assert refused.value.param == "structured_outputs.regex"
