"""The policy ``auto``: exact without a calibration of this very model, and what that allows with one."""

import json
import logging
import os
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from server_helpers import SMALL_POOL, data_url, fake_server, png

from mpic.config import Config, ConfigError, EngineConfig, check_engine
from mpic.data.bundled import model_folder
from mpic.link import parse_policy
from mpic.link.engines import PROVIDES, refusal
from mpic.model.load import load_model
from mpic.server.auto import Auto, Calibration, MeasuredPolicy, Unusable, path_of, read_calibration
from mpic_lab.calibrate.cli import POLICIES

INFO = FakeEngine().info
IMAGE = {"type": "image_url", "image_url": {"url": data_url(png())}}
TEXT = {"type": "document", "text": "Vera lives in Oslo. " * 20}
ASK = {"type": "text", "text": "What is it?"}


def tried(policy, high, saved):
    return MeasuredPolicy(policy=policy, questions=300, lost=0.0, low=-1.0, high=high, kl=0.1, saved=saved)


def calibration(**fields):
    """Under a bound of 2 points reuse is for neither kind, mpic-8 for images, mpic-32 for both."""
    kinds = {
        "image": (tried("reuse", 30, 90), tried("mpic-8", 1.5, 40), tried("mpic-32", 1, 17)),
        "text": (tried("reuse", 9, 90), tried("mpic-8", 2.1, 40), tried("mpic-32", 1.9, 17)),
    }
    given = {"model": INFO.digest, "kv_dtype": "float32", "name": "fake", "bound": 2.0, "kinds": kinds}
    return Calibration(**{**given, **fields})


def write(folder, content, info=INFO):
    path = path_of(folder, info.digest, "float32")
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(content if isinstance(content, str) else content.model_dump_json())
    return path


async def served(tmp_path, template, *prompts, **options):
    """The policies that answers to prompts name, and what /health says, of a server with the default configuration."""
    async with fake_server(tmp_path, template, config=Config()) as server:
        answers = [(await server.ask(list(prompt), **options)).json() for prompt in prompts]
        health = (await server.http.get("/health")).json()
    return [answer["usage"]["mpic"]["policy"] for answer in answers], health


PROMPTS = ([ASK], [IMAGE, ASK], [TEXT, ASK], [IMAGE, TEXT, ASK])


async def test_a_model_without_a_calibration_is_served_exactly_and_the_server_says_so(tmp_path, template):
    policies, health = await served(tmp_path, template, *PROMPTS)
    assert policies == ["prefix"] * 4 and health["policy"] == "prefix"
    assert health["auto"]["default"] and health["auto"]["policies"] == {"image": "prefix", "text": "prefix"}
    why = health["auto"]["why"]
    assert "not calibrated" in why and "mpic calibrate" in why and "--policy mpic-32" in why


async def test_each_prompt_gets_the_cheapest_policy_within_the_bound_for_all_its_kinds(tmp_path, template):
    write(tmp_path, calibration())
    policies, health = await served(tmp_path, template, *PROMPTS)
    assert policies == ["mpic-32", "mpic-8", "mpic-32", "mpic-32"]
    assert health["policy"] == "mpic-32"
    assert health["auto"]["policies"] == {"image": "mpic-8", "text": "mpic-32"}
    assert "mpic-8 for images (at most 1.5 points of 100 lost, 300 questions)" in health["auto"]["why"]


async def test_a_kind_that_was_not_calibrated_is_served_exactly(tmp_path, template):
    write(tmp_path, calibration(kinds={"image": (tried("mpic-8", 1, 40),)}))
    policies, health = await served(tmp_path, template, *PROMPTS)
    assert policies == ["prefix", "mpic-8", "prefix", "prefix"]
    assert "prefix for documents (exact)" in health["auto"]["why"]


async def test_a_calibration_in_which_nothing_is_within_the_bound_leaves_the_exact_policy(tmp_path, template):
    write(tmp_path, calibration(bound=0.5))
    policies, health = await served(tmp_path, template, *PROMPTS)
    assert policies == ["prefix"] * 4 and "at most 0.5 points" in health["auto"]["why"]


WHOLE = json.loads(calibration().model_dump_json())
BAD = {
    "cut off": ('{"format": 1, ', "it is damaged"),
    "of another form": (json.dumps({**WHOLE, "format": 2}), "format"),
    "with an unknown field": (json.dumps({**WHOLE, "extra": 1}), "extra"),
    "without a number": (json.dumps({**WHOLE, "bound": "2"}), "bound"),
    "of another model": (calibration(model="1" * 64), "another model"),
    "of another type of KV": (calibration(kv_dtype="float16"), "another type of KV"),
    "with an unknown policy": (calibration().model_dump_json().replace("mpic-8", "best-8"), "unknown policy"),
    "with a policy that not every request can have": (
        calibration().model_dump_json().replace("mpic-8", "cacheblend-15"),
        "cannot be chosen by auto",
    ),
    "with an unknown kind": (calibration().model_dump_json().replace('"image"', '"sound"'), "sound"),
    "too large": (" " * 70_000, "larger than"),
}


@pytest.mark.parametrize("content, says", BAD.values(), ids=BAD)
async def test_a_calibration_that_cannot_be_used_is_named_and_the_model_is_served_exactly(
    tmp_path, template, caplog, content, says
):
    path = write(tmp_path, content)
    with caplog.at_level(logging.WARNING):
        policies, health = await served(tmp_path, template, [IMAGE, ASK])
    assert policies == ["prefix"]
    for said in (caplog.text, health["auto"]["why"]):
        assert str(path) in said and says in said


@pytest.mark.parametrize("place", [os.mkfifo, os.mkdir])
def test_a_calibration_that_is_no_file_is_named_and_not_waited_for(tmp_path, place):
    path = write(tmp_path, "x")
    path.unlink()
    place(path)
    with pytest.raises(Unusable, match="it is not a file"):
        read_calibration(path)


async def test_a_request_may_ask_for_auto_and_for_a_policy_by_name(tmp_path, template):
    write(tmp_path, calibration())
    named = Config(engine=EngineConfig(policy="full"))
    async with fake_server(tmp_path, template, config=named) as server:
        asked = [None, "auto", "reuse"]
        answers = [await server.ask([IMAGE, ASK], mpic={"policy": name}) for name in asked]
        assert [a.json()["usage"]["mpic"]["policy"] for a in answers] == ["full", "mpic-8", "reuse"]
        health = (await server.http.get("/health")).json()
        assert health["policy"] == "full" and not health["auto"]["default"]


async def test_a_press_goes_with_auto_where_that_reads_compiled_chunks_and_is_refused_elsewhere(
    tmp_path, template
):
    pressed = Config(engine=EngineConfig(press="snapkv-50-32"))
    with pytest.raises(ConfigError, match="not calibrated", check=lambda error: error.param == "press"):
        async with fake_server(tmp_path / "none", template, config=pressed):
            pass
    async with fake_server(tmp_path / "plain", template, config=Config()) as server:
        refused = await server.ask([IMAGE, ASK], mpic={"press": "snapkv-50"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "mpic.press"
        assert (await server.ask([IMAGE, ASK], mpic={"press": "none"})).status_code == 200
    write(tmp_path, calibration())
    async with fake_server(tmp_path, template, config=pressed) as server:
        answer = (await server.ask([IMAGE, ASK])).json()
        assert answer["usage"]["mpic"]["policy"] == "mpic-8"
        (request,) = server.engine.requests
        assert [chunk.press for chunk in request.prompt.chunks] == ["snapkv-50-32"]
    short = Config(engine=EngineConfig(press="snapkv-50"))
    with pytest.raises(ConfigError, match="ask for snapkv-50-32"):
        async with fake_server(tmp_path, template, config=short):
            pass


@pytest.mark.parametrize("engine", PROVIDES)
def test_both_engines_serve_auto_and_all_that_a_calibration_tries(engine):
    check_engine(EngineConfig(engine=engine, policy="auto"))
    assert [refusal(parse_policy(name), engine) for name in POLICIES.split(",")] == [None] * 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name, policy", [("large", "mpic-16"), ("demo", "mpic-16"), ("large-plain", "prefix")]
)
def test_a_bundled_model_that_was_made_for_reuse_is_calibrated(tmp_path, name, policy, dtype):
    auto = Auto.of_model(load_model(str(model_folder(name)), device="cpu", dtype=dtype).info, tmp_path)
    assert auto.policies == {"image": policy, "text": policy} and auto.default.name == policy


def test_an_operators_own_calibration_comes_before_the_bundled_one(tmp_path):
    info = load_model(str(model_folder("demo")), device="cpu", dtype="float32").info
    write(tmp_path, calibration(model=info.digest), info)
    assert Auto.of_model(info, tmp_path).policies == {"image": "mpic-8", "text": "mpic-32"}


def test_a_video_counts_as_a_kind_that_nobody_has_calibrated():
    auto = Auto(calibration=calibration())
    clip, image = (SimpleNamespace(kind=kind) for kind in ("video", "image"))
    assert auto.for_chunks([image]).name == "mpic-8"
    assert auto.for_chunks([clip]).name == auto.for_chunks([image, clip]).name == "prefix"


def test_a_server_over_a_model_without_a_calibration_answers_exactly(tmp_path, tiny_model):
    from mpic import MPIC

    with MPIC.local(tiny_model, tmp_path, **SMALL_POOL) as client:
        answer = client.chat.completions.create([{"role": "user", "content": [IMAGE, ASK]}], max_tokens=2)
        assert answer.usage.mpic.policy == "prefix" and answer.usage.mpic.tokens.reused == 0
        assert client.health().auto.default
