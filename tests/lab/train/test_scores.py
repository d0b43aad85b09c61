"""Scores and model card of a demo checkpoint are complete and state what was run."""

import json
import shutil

import pytest
import torch
from train_tools import hidden_states

from mpic.config import ConfigError
from mpic_lab.generator import EVAL_TASKS, Generator
from mpic_lab.generator.tokenizer import build_tokenizer
from mpic_lab.train.batch import Encoder, collate, collate_branches, shared_tokens
from mpic_lab.train.card import write_card
from mpic_lab.train.evaluate import evaluate, markdown, summary, write_report
from mpic_lab.train.generations import FIRST
from mpic_lab.train.model import build_model, load_model, save_model
from mpic_lab.train.scoring import SUMMARY_LINKS

torch.set_num_threads(1)  # two that share a busy core wait for each other


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    save_model(build_model(tokenizer, layers=1), tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def result(folder):
    cells = {"card": (2,), "search thing": (0, 1)}
    return evaluate(folder, 2, cells=cells, workers=1, progress=lambda cells, total: cells)


def test_every_cell_is_scored_under_every_link_with_its_recomputed_share(result):
    assert len(result["rows"]) == 3 * len(SUMMARY_LINKS)
    share = {r["link"]: r["recomputed"] for r in result["rows"] if r["task"] == "card"}
    assert share["reuse"] == 0 and share["full"] == 1 and 0.1 < share["mpic-16"] < 0.4
    assert len(result["first_token_share_by_layer"]) == 1


def test_no_time_means_no_rows(folder):
    result = evaluate(folder, 2, minutes=0, progress=lambda cells, total: cells)
    assert result["rows"] == [] and len(result["unfinished"]) == sum(map(len, FIRST.cells.values()))


def test_report_and_card_show_the_figures(result, folder, tmp_path):
    write_report(result, folder)
    assert markdown(result) in (folder / "scores.md").read_text()
    assert json.loads((folder / "scores.json").read_text())["summary"]["search made when needed"] is not None
    assert summary(result)["recomputed by link"]["full"] == 100.0
    row = {"step": 20, "seconds": 60, "tokens_per_s": 1000, "loss": 1.0}
    log = [{"stage": stage, **row} for stage in ("vision", "base", "pic")]
    (tmp_path / "curves.json").write_text(json.dumps(log))
    for pic in (True, False):
        write_card(folder, tmp_path, pic, "two CPU cores", "mpic train mllm", "- Nothing.")
        text = (folder / "README.md").read_text()
        assert ("PIC-aware phase** (1 min)" in text) == pic
        assert "structured" in text and "| card | 2 | 2 | 1 |" in text and str(folder) not in text
        assert "20 questions a conversation, curriculum from 1-2 chunks to 10." in text
    write_card(folder, tmp_path, True, "two CPU cores", "mpic train mllm", "- Nothing.", " It went on.")
    text = (folder / "README.md").read_text()  # all conversations of a run that goes on are of the full mix
    assert "It went on." in text and "20 questions a conversation." in text and "curriculum" not in text


def test_the_card_of_each_generation_describes_its_own_model(result, folder, tmp_path):
    write_report(result, folder)
    row = {"step": 20, "seconds": 60, "tokens_per_s": 1000, "loss": 1.0}
    (tmp_path / "curves.json").write_text(
        json.dumps([{"stage": s, **row} for s in ("vision", "base", "pic")])
    )
    write_card(folder, tmp_path, True, "two CPU cores", "mpic train mllm", "- Nothing.")
    text = (folder / "README.md").read_text()
    assert "64 x 64 px images are 64 tokens,\n2,048 tokens of context" in text and "(4 to 32 tokens)" in text
    assert "image one:<image> end of image one" in text and "summaries" in text and "sinks" not in text
    config = json.loads((folder / "config.json").read_text())
    large = tmp_path / "large"
    shutil.copytree(folder, large)
    config["image_seq_length"] = 576
    (large / "config.json").write_text(json.dumps(config))
    write_card(large, tmp_path, True, "two CPU cores", "mpic train mllm", "- Nothing.")
    text = (large / "README.md").read_text()
    assert "images are 576 tokens" in text and "(8 to 64 tokens)" in text
    assert "image one:<image>" in text and "attention sinks" in text


def test_the_card_of_a_run_that_trained_no_tower_says_so(result, folder, tmp_path):
    write_report(result, folder)
    row = {"step": 20, "seconds": 60, "tokens_per_s": 1000, "loss": 1.0}
    (tmp_path / "curves.json").write_text(json.dumps([{"stage": s, **row} for s in ("base", "pic")]))
    write_card(folder, tmp_path, True, "two CPU cores", "mpic train mllm", "- Nothing.", "It went on.")
    text = (folder / "README.md").read_text()
    assert "1. **Vision** (not in this run):" in text and "2. **Base** (1 min)" in text
    assert "2 min of training on two CPU cores, 40 steps" in text


def test_the_wordings_written_last_are_scored_beside_the_others(folder):
    card = {"card": (2,)}
    evaluate(folder, 2, cells=card, workers=1, progress=lambda cells, total: cells)  # kept, for resuming
    fresh = evaluate(folder, 2, cells=card, workers=1, asking="fresh", progress=lambda cells, total: cells)
    write_report(fresh, folder)
    assert json.loads((folder / "scores-fresh.json").read_text())["wordings"] == "fresh"
    assert (folder / "scores.part.json").exists() and not (folder / "scores-fresh.part.json").exists()
    (asked,), (again,) = (
        {turn.user[-1] for c in Generator(1, "eval", asking).branches("two-hop", 4, 1) for turn in c.turns}
        for asking in ("eval", "fresh")
    )
    assert asked != again


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no model to score"):
        evaluate(tmp_path, 2)


@pytest.mark.parametrize("link", SUMMARY_LINKS, ids=lambda link: link.name)
@pytest.mark.parametrize("task", ["mixed", "search picture", "caption"])
def test_questions_that_share_a_context_are_answered_as_if_asked_alone(folder, task, link):
    model, tokenizer = load_model(folder)
    generator, encoder = Generator(3, "eval"), Encoder(tokenizer)
    groups = [[encoder(c) for c in generator.branches(task, count, 4)] for count in (3, 5)]
    together = collate_branches(groups, [link.head] * 2, link.shift)
    alone = [(e, collate([e], [link.head], link.shift)) for group in groups for e in group]
    assert len(alone) >= 6 and together.tokens < 0.6 * sum(batch.tokens for _, batch in alone)
    with torch.no_grad():
        shared = hidden_states(model, together)
        for row, (example, batch) in enumerate(alone):
            expected = hidden_states(model, batch)[0]
            torch.testing.assert_close(shared[row, : len(example.ids)], expected, atol=1e-4, rtol=1e-4)


def test_the_part_that_is_shared_ends_before_anything_that_differs(folder):
    encoder = Encoder(load_model(folder)[1])
    for task in EVAL_TASKS:
        group = [encoder(c) for c in Generator(5, "eval").branches(task, 4, 8)]
        shared = shared_tokens(group)
        assert len({tuple(e.ids[:shared]) for e in group}) == 1
        assert all(shared < e.answers[0][0] for e in group)
        if len(group) > 1:
            assert shared >= group[0].chunks[3][1]


def test_an_interrupted_run_resumes_and_gives_the_same_rows(folder):
    cells = {"card": (2,), "search thing": (0, 1)}
    watched = []

    def stop_after_one(rows, total):
        for row in rows:
            yield row
            watched.append(total)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(folder, 3, cells=cells, workers=1, progress=stop_after_one)
    whole = evaluate(folder, 3, cells=cells, workers=2, resume=True, progress=lambda rows, total: rows)
    again = evaluate(folder, 3, cells=cells, workers=1, progress=lambda rows, total: rows)
    assert watched == [3] and whole["rows"] == again["rows"] and not whole["unfinished"]
    with pytest.raises(ConfigError, match="size"):
        evaluate(folder, 4, cells=cells, workers=1, resume=True, progress=lambda rows, total: rows)
