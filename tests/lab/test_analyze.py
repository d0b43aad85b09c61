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

from mpic.errors import NoAdapter, UnsupportedParameter
from mpic.link import parse_policy
from mpic.model.hooks import LayerCall
from mpic_lab.analyze import cli, many, measures
from mpic_lab.analyze.dense import DenseLinker, Recorder
from mpic_lab.analyze.packet_attention import FIRST, LAST, PacketAttention
from mpic_lab.train.packet import initial


def case(name):
    images = name not in ("llama",)
    a = image_chunk(random_image(1)) if images else text_chunk(ids(1, 14))
    return prompt_of(ids(2, 5), a, ids(3, 2), text_chunk(ids(4, 9)), ids(5, 4))


POLICIES = ["full", "reuse", "mpic-3", "attnlink-4", "legolink-0", "packet", "packet-4"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama", "qwen2_vl", "qwen3_vl"])
def test_keys_and_values_of_a_link_are_the_oracles(name, policy):
    prompt, fam, policy = case(name), family(name), parse_policy(policy)
    linker = DenseLinker(fam.loaded, initial(fam.loaded.model, 3, 0))
    linked = linker.link(prompt, policy)
    made = [linker.inputs(chunk) for chunk in prompt.chunks]
    if policy.wrapping.packet:
        made = [linker.adapter.wrap(one, fam.loaded.embed) for one in made]
    truth = oracle.Oracle(fam.stock, fam.loaded.mrope)
    truth.generate(prompt, made, policy, select(prompt, made, policy), 1, fam.loaded.bos_id)
    for layer in range(len(linked.keys)):
        assert (linked.keys[layer] - truth.cache.keys[layer]).abs().max() < 1e-4
        assert (linked.values[layer] - truth.cache.values[layer]).abs().max() < 1e-4
    for weights in linked.weights:
        assert torch.allclose(weights.sum(1), torch.ones(len(linked.rows)), atol=1e-5)


def test_attention_is_recorded_in_host_memory_whatever_device_computes_it(monkeypatch):
    """Tensors of the device "meta" have no numbers, and refuse operations with those of a CPU, as CUDA's do."""
    moved = []

    def cpu(tensor):
        moved.append(tensor.device.type)
        return torch.zeros(tensor.shape)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    query, key, value = (torch.randn(1, heads, 4, 8, device="meta") for heads in (4, 2, 2))
    recorder = Recorder(*[None] * 7, index=torch.tensor([3, 4, 5, 9]), length=10)
    out = recorder.attend(LayerCall(0, query, key, value, 0.35, None))
    assert out.device.type == "meta" and recorder.cache[0][0].device.type == "meta"
    assert moved == ["meta"] and recorder.weights[0].shape == (4, 10)


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


def test_attention_to_packets_is_counted_beside_attention_to_bare_chunks_token_by_token():
    fam = family("llama")
    linker = DenseLinker(fam.loaded, initial(fam.loaded.model, 3, 0))
    reuse, packet = (parse_policy(name) for name in ("reuse", "packet"))
    prompt = prompt_of(ids(2, 5), text_chunk(ids(1, 40)), ids(3, 2), text_chunk(ids(4, 36)), ids(5, 4))
    found = PacketAttention(linker, (reuse, packet), 2)
    found.add(prompt)
    found.add(prompt)
    bare, wrapped = found.mean("reuse"), found.mean("packet")
    assert found.columns == 3 + FIRST + LAST + 3 == bare.shape[1]
    assert not bare[:, :3].any() and not bare[:, -3:].any() and (bare[:, 3:-3] > 0).all()
    linked = linker.link(prompt, packet)
    rows = torch.stack([layer[-4:].mean(0) for layer in linked.weights]).mean(0)
    second = rows[linked.places[1].start :][: 3 + 36 + 3]
    assert torch.allclose(wrapped[1], torch.cat([second[: 3 + FIRST], second[-LAST - 3 :]]))
    assert found.numbers()["reuse"]["header"] == 0 < found.numbers()["packet"]["trailer"]
    with pytest.raises(UnsupportedParameter, match="has 9 tokens"):
        found.add(prompt_of(ids(2, 5), text_chunk(ids(1, 40)), text_chunk(ids(4, 9)), ids(5, 4)))
    with pytest.raises(NoAdapter, match="mpic train packet"):
        DenseLinker(fam.loaded).link(prompt, packet)


def test_tokens_are_grouped_by_their_place_in_a_chunk():
    names = many.group_names(2)
    prompt = prompt_of(ids(2, 3), text_chunk(ids(1, 14)), ids(3, 2), text_chunk(ids(4, 3)), ids(5, 4))
    full = DenseLinker(family("llama").loaded).link(prompt, parse_policy("full"))
    found = [names[number] for number in many.groups_of(full.places, 26)]
    inside = ["0", "1", "2-3", "2-3", *["4-7"] * 4, *["8-15"] * 6]
    assert found[:3] == ["first token", "text before", "text before"]
    assert found[3:17] == [f"chunk 1: {one}" for one in inside] and found[17:19] == ["text between"] * 2
    assert found[19:22] == ["chunk 2: 0", "chunk 2: 1", "chunk 2: 2-3"] and found[22:] == ["question"] * 4


def test_sums_over_prompts_are_means_of_what_each_shows():
    linker = DenseLinker(family("llama").loaded)
    prompts = [
        prompt_of(ids(n, 5), text_chunk(ids(n + 1, 14)), ids(3, 2), text_chunk(ids(n + 2, 9 + n)), ids(5, 4))
        for n in (10, 20)
    ]
    policies = tuple(parse_policy(name) for name in ("full", "reuse"))
    both = many.Gathered(linker, policies, 2)
    each = [many.Gathered(linker, policies, 2) for _ in prompts]
    for prompt, one in zip(prompts, each, strict=True):
        both.add(prompt)
        one.add(prompt)
    for what in ("first", "heads", "error"):
        one, other = (single.spread("reuse", what)[0] for single in each)
        mean, deviation = both.spread("reuse", what)
        assert torch.allclose(mean, (one + other) / 2, atol=1e-6)
        assert torch.allclose(deviation, (one - other).abs() / 2, atol=1e-6)
    assert both.spread("full", "error")[0].max() < 1e-6 < both.spread("reuse", "error")[0].max()
    full = linker.link(prompts[0], policies[0])
    first = torch.stack([layer[1:, 0].mean() for layer in full.weights])
    assert torch.allclose(each[0].spread("full", "first")[0], first, atol=1e-6)
    last = torch.stack([layer[-1, 5:19] for layer in full.weights])
    assert torch.allclose(each[0].places[0], last.cumsum(1) / last.sum(1, keepdim=True), atol=1e-6)
    row = each[0].attention_map("full", 1)[-1]  # that of the first output token
    assert torch.isclose(row[many.group_names(2).index("chunk 1: 2-3")], full.weights[1][-1, 7:9].mean())
    assert each[0].attention_map("reuse", 1)[2].isnan().all()  # a chunk's tokens are not computed
    assert (both.distribution()[:, -1] - 1).abs().max() < 1e-6
    numbers = both.numbers()
    deviations = numbers["deviations"]["policies"]["reuse"]["heads"]
    assert deviations == many.rounded(both.spread("reuse", "heads")[1]) and max(deviations) > 0
    assert numbers["prompts"] == 2 and max(both.counts()) <= numbers["layers_where_important"]["of"]
    with pytest.raises(UnsupportedParameter, match="1 chunks and not 2"):
        both.add(prompt_of(ids(2, 3), text_chunk(ids(1, 14)), ids(3, 2)))


def test_policies_that_decide_while_they_run_cannot_be_drawn():
    with pytest.raises(UnsupportedParameter, match="cacheblend-15"):
        DenseLinker(family("llama").loaded).link(case("llama"), parse_policy("cacheblend-15"))


def test_the_command_writes_its_figures_and_numbers(tmp_path, monkeypatch):
    from mpic_lab.analyze import figures

    drawn, save = [], figures.save_png

    def spied(path, draw, *size, **options):
        def draw_and_look(figure):
            draw(figure)
            drawn.append(figure)

        return save(path, draw_and_look, *size, **options)

    monkeypatch.setattr(figures, "save_png", spied)
    words = ["--model", str(SMALL), "--chunks", "2", "--out", str(tmp_path), "--policies", "reuse"]
    result = CliRunner().invoke(cli.app, words)
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


def test_the_command_sums_up_several_samples(tmp_path):
    words = ["--model", str(SMALL), "--chunks", "2", "--out"]
    words += [str(tmp_path), "--policies", "reuse", "--samples", "3"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    names = {"attention-scores.png", "important-tokens.png"}
    names |= {"attention-groups.png", "sinks.png", "analysis.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    numbers = json.loads((tmp_path / "analysis.json").read_text())
    assert (numbers["prompts"], numbers["chunks"], numbers["layers_where_important"]["of"]) == (3, 2, 4)
    assert len(numbers["first_token_of_a_chunk_alone"]) == 5 == len(numbers["policies"]["reuse"]["heads"])
    entry = {"input": "Who?", "context": "Passage 1:\nAna.\nPassage 2:\nBob.", "answers": ["Ana"]}
    (tmp_path / "one.jsonl").write_text(json.dumps(entry) + "\n")
    few = CliRunner().invoke(
        cli.app, [*words, "--task", "longbench-qa", "--path", str(tmp_path / "one.jsonl")]
    )
    assert few.exit_code != 0 and "longbench-qa has no sample 1" in str(few.exception)
