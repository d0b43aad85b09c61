"""Scores and model card of a demo checkpoint: complete, and honest about what was run."""

import json

import pytest
import torch

from mpic.data.generator.tokenizer import build_tokenizer
from mpic.train.card import write_card
from mpic.train.evaluate import LINKS, evaluate, markdown, plot, summary, write_report
from mpic.train.model import build_model, save_model

torch.set_num_threads(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    save_model(build_model(tokenizer, layers=1), tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def result(folder):
    cells = {"card": (2,), "search thing": (0, 1)}
    return evaluate(folder, 2, cells=cells, progress=lambda todo: todo)


def test_every_cell_is_scored_under_every_link_with_its_recomputed_share(result):
    assert len(result["rows"]) == 3 * len(LINKS)
    share = {r["link"]: r["recomputed"] for r in result["rows"] if r["task"] == "card"}
    assert share["reuse"] == 0 and share["full"] == 1 and 0.1 < share["mpic-16"] < 0.4
    assert len(result["first_token_share_by_layer"]) == 1


def test_no_time_means_no_rows(folder):
    assert evaluate(folder, 2, minutes=0, progress=lambda todo: todo)["rows"] == []


def test_report_and_card_show_the_figures(result, folder, tmp_path):
    write_report(result, folder)
    assert markdown(result) in (folder / "scores.md").read_text()
    assert json.loads((folder / "scores.json").read_text())["summary"]["search made when needed"] is not None
    assert summary(result)["recomputed by link"]["full"] == 100.0
    log = [
        {"stage": stage, "step": 20, "seconds": 60, "tokens_per_s": 1000, "loss": 1.0}
        for stage in ("vision", "base", "pic")
    ]
    (tmp_path / "curves.json").write_text(json.dumps(log))
    for pic in (True, False):
        write_card(folder, tmp_path, pic, "two CPU cores", "mpic train mllm", "- Nothing.")
        text = (folder / "README.md").read_text()
        assert ("PIC-aware phase** (1 min)" in text) == pic
        assert "structured" in text and "| card | 2 | 2 |" in text and str(folder) not in text
    plot({"default": result}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
