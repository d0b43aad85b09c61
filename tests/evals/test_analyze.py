"""``mpic analyze`` draws the values that the oracle computes."""

from __future__ import annotations

import json

import oracle
import pytest
import torch
from engine_kit import family, ids, image_chunk, prompt_of, select, text_chunk
from families import random_image
from small_models import SMALL
from typer.testing import CliRunner

from mpic.errors import UnsupportedParameter
from mpic.evals.analyze import cli, measures
from mpic.evals.analyze.dense import DenseLinker
from mpic.link import parse_policy


def case(name):
    images = name not in ("llama",)
    a = image_chunk(random_image(1)) if images else text_chunk(ids(1, 14))
    return prompt_of(ids(2, 5), a, ids(3, 2), text_chunk(ids(4, 9)), ids(5, 4))


@pytest.mark.parametrize("policy", ["full", "reuse", "mpic-3", "attnlink-4", "legolink-0"])
@pytest.mark.parametrize("name", ["llama", "qwen2_vl", "qwen3_vl"])
def test_keys_and_values_of_a_link_are_the_oracles(name, policy):
    prompt, fam, policy = case(name), family(name), parse_policy(policy)
    linker = DenseLinker(fam.loaded)
    linked = linker.link(prompt, policy)
    made = [linker.inputs(chunk) for chunk in prompt.chunks]
    truth = oracle.Oracle(fam.stock, fam.loaded.mrope)
    truth.generate(prompt, made, policy, select(prompt, made, policy), 1, fam.loaded.bos_id)
    for layer in range(len(linked.keys)):
        assert (linked.keys[layer] - truth.cache.keys[layer]).abs().max() < 1e-4
        assert (linked.values[layer] - truth.cache.values[layer]).abs().max() < 1e-4
    for weights in linked.weights:
        assert torch.allclose(weights.sum(1), torch.ones(len(linked.rows)), atol=1e-5)


def test_measures_are_shares_and_distances():
    linker = DenseLinker(family("llama").loaded)
    full, reuse = (linker.link(case("llama"), parse_policy(name)) for name in ("full", "reuse"))
    for curve in (measures.concentration(full), measures.by_place(full)):
        assert (curve[:, 1:] >= curve[:, :-1] - 1e-6).all() and curve.max() < 1 + 1e-5
    assert measures.concentration(full)[:, -1].min() > 1 - 1e-5
    assert measures.attention_error(full, full).max() < 1e-6
    assert 0 < measures.attention_error(reuse, full).max() <= 1
    same = measures.distance(linker, text_chunk(ids(6, 8)), (ids(7, 3), ids(7, 3)))
    other = measures.distance(linker, text_chunk(ids(6, 8)), (ids(7, 3), ids(8, 6)))
    assert same["keys"].max() < 1e-5 < other["values"][1].max()
    assert other["keys"][0].max() < 1e-4  # the first layer's depend on the token alone


def test_policies_that_decide_while_they_run_cannot_be_drawn():
    with pytest.raises(UnsupportedParameter, match="cacheblend-15"):
        DenseLinker(family("llama").loaded).link(case("llama"), parse_policy("cacheblend-15"))


def test_the_command_writes_its_figures_and_numbers(tmp_path, monkeypatch):
    from mpic.evals.analyze import figures

    drawn, save = [], figures.save_png

    def spied(path, draw, *size, **options):
        def draw_and_look(figure):
            draw(figure)
            drawn.append(figure)

        return save(path, draw_and_look, *size, **options)

    monkeypatch.setattr(figures, "save_png", spied)
    result = CliRunner().invoke(
        cli.app, ["--model", str(SMALL), "--chunks", "2", "--out", str(tmp_path), "--policies", "reuse"]
    )
    assert result.exit_code == 0, result.output
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"attention-shares.png", "kv-distance.png", "attention-maps.png", "attention-error.png"}
    numbers = json.loads((tmp_path / "analysis.json").read_text())
    assert numbers["policies"] == ["full", "reuse"] and max(numbers["attention_error"]["full"]) < 1e-5
    assert set(numbers["kv_distance"]) == {"keys", "values"}
    assert all(len(part) == 5 for one in numbers["kv_distance"].values() for part in one.values())
    assert len(drawn) == 4
    for figure in drawn:  # each has a title and a sentence on what it shows
        assert len(figure.get_suptitle()) > 10 and figure.get_supxlabel().endswith(".")
    layers = drawn[3].axes[0].get_xticks()
    assert all(tick == int(tick) for tick in layers)
