"""Points lost and their intervals are paired by question; reports are filled from runs."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from mpic.errors import BadRequest
from mpic_lab.eval import cli
from mpic_lab.eval.answers import PolicyAnswer, lines_of
from mpic_lab.eval.compare import cells_of, compare_policies, interval, losses
from mpic_lab.eval.evidence import fill
from mpic_lab.eval.lengths import length_table
from mpic_lab.eval.plots import by_chunks, by_task, pareto, tradeoff
from mpic_lab.eval.report import advice, write_report
from mpic_lab.eval.tables import count_table, loss_table, needle_scores, summary_table


def answers(policy, right, task="world-card", chunks=2, **more):
    """Make answers; ``right`` says for each question whether its answer is right."""
    more = {"ttft_ms": 1, "flops": 1, "chunk_tokens": 9, **more}
    scores = [{"em": float(r)} for r in right]
    return [
        PolicyAnswer(task, chunks, str(i), policy, "yes", scores=score, **more)
        for i, score in enumerate(scores)
    ]


def test_scores_by_length_have_the_same_questions_for_every_policy():
    found = []
    for policy, right in (("full", [1] * 8), ("reuse", [1] * 4 + [0] * 4), ("mpic-16", [1] * 6)):
        mine = answers(policy, right, answer_tokens=2)
        for number, answer in enumerate(mine):
            answer.prompt_tokens = 100 * number
        found += mine
    rows = length_table(answers("full", [1]) + answers("reuse", [0]))
    assert rows[0] == ["prompt tokens", "questions", "full", "reuse"]
    assert rows[1] == ["0 to 0", "1", "100.0", "+100.0 [+100.0, +100.0]"]
    head, *rows = length_table(found)
    assert head[2:] == ["full", "reuse", "mpic-16"] and [row[1] for row in rows] == ["2", "2", "1", "1"]
    # of the six that all have answered
    assert [row[3].split()[0] for row in rows] == ["+0.0", "+0.0", "+100.0", "+100.0"]
    assert length_table(found, ["mpic-16"])[0][2:] == ["full", "mpic-16"]
    assert rows[0][0] == "0 to 100" and rows[-1][0] == "500 to 500"


def test_a_policy_looks_alike_in_every_panel_of_a_plot():
    both = compare_policies(
        [*answers("full", [1, 1]), *answers("reuse", [1, 0]), *answers("mpic-16", [0, 1])]
    )
    figure = Figure()
    by_task(figure, {"in one order": both, "in another": both[::-1]})
    looks = [
        [(line.get_marker(), line.get_color()) for line in axes.lines if line.get_marker() != "None"]
        for axes in figure.axes[:2]
    ]
    assert len(set(looks[0])) == 3 and looks[1] == looks[0][::-1]


def test_runs_are_drawn_side_by_side(tmp_path):
    for name in ("fixed", "paragraph"):
        (tmp_path / name).mkdir()
        both = [*answers("full", [1, 1]), *answers("reuse", [1, 0])]
        (tmp_path / name / "answers.jsonl").write_text(lines_of(both))
    words = ["plot", str(tmp_path / "fixed"), str(tmp_path / "paragraph")]
    words += ["--out", str(tmp_path / "split.png")]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0 and (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "fixed" / "answers.jsonl").write_text("")
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code != 0 and "fixed: no answers" in str(done.exception)


def test_the_front_holds_the_policies_that_no_other_one_beats_in_both():
    assert pareto([(1.0, 90), (0.5, 80), (0.6, 70), (0.5, 60), (1.0, 95)]) == [(0.5, 80), (1.0, 95)]


def lost_by_reuse(right):
    """Points lost where ``full`` answers every question."""
    both = [*answers("full", [1] * len(right)), *answers("reuse", right)]
    return losses(cells_of(both), "reuse")["world-card"]


def test_noise_that_both_answers_share_is_no_noise_of_the_difference():
    """The hard questions vary between draws; a policy that fails on the same ones has lost nothing."""
    hard = [i % 2 == 0 for i in range(200)]
    _, found = compare_policies([*answers("full", hard), *answers("mpic-16", hard)])
    assert (found.policy, found.lost) == ("mpic-16", (0, 0, 0))


@pytest.mark.parametrize("questions, width", [(100, 17), (400, 8.5)])
def test_the_interval_is_the_bootstraps_and_narrows_with_the_square_root_of_the_questions(questions, width):
    """A fifth of the questions lost, at random: 1.96 x sqrt(0.2 x 0.8 / n) to each side."""
    mine = [i % 5 != 0 for i in range(questions)]
    lost = lost_by_reuse(mine)
    assert lost.points == pytest.approx(20)
    assert lost.high - lost.low == pytest.approx(2 * 1.96 * 100 * (0.16 / questions) ** 0.5, rel=0.15)
    assert lost.high - lost.low == pytest.approx(width, rel=0.2)


def test_the_interval_holds_the_truth_as_often_as_it_promises():
    """100 runs of 60 questions of which the policy loses one in ten: about 95 intervals hold ten points."""
    rng = random.Random(1)
    held = 0
    for _ in range(100):
        mine = [rng.random() >= 0.1 for _ in range(60)]
        lost = lost_by_reuse(mine)
        held += lost.low <= 10 <= lost.high
    assert held >= 88


def test_the_interval_of_cells_with_few_questions_is_as_wide_as_it_has_to_be():
    """30 cells of 3 questions, of which a fifth is lost: the deviation is that of 90 questions."""
    rng = np.random.default_rng(2)
    widths = []
    for _ in range(60):
        low, high = interval([rng.random(3) < 0.2 for _ in range(30)])
        widths.append(high - low)
    assert np.mean(widths) == pytest.approx(2 * 1.96 * (0.16 / 90) ** 0.5, rel=0.05)


def test_every_cell_counts_the_same_however_many_questions_it_has():
    both = [
        *answers("full", [1] * 10, chunks=2),
        *answers("reuse", [0] * 10, chunks=2),
        *answers("full", [1] * 90, chunks=4),
        *answers("reuse", [1] * 90, chunks=4),
    ]
    assert losses(cells_of(both), "reuse")["world-card"].points == pytest.approx(50)
    assert loss_table(both)[-1][:3] == ["all cells", "100", "100.0"]


def test_advice_warns_when_questions_are_too_few():
    def said(n):
        return advice(compare_policies([*answers("full", [1] * n), *answers("mpic-16", [1] * n)]))

    assert "too few" in said(10) and "too few" not in said(200)


def test_a_reports_tables_are_filled_from_runs(tmp_path):
    (tmp_path / "run").mkdir()
    kept = [*answers("full", [1] * 4, pieces=2), *answers("mpic-16", [1, 1, 1, 0], pieces=2)]
    (tmp_path / "run" / "answers.jsonl").write_text(lines_of(kept))
    marks = ["losses run", "losses run:world-image,world-card"]
    marks += ["summary run mpic-16", "cells run", "counts score run"]
    grid = [PolicyAnswer("niah", 0, f"600@{d}#0", "full", scores={"contains": d / 50}) for d in (0, 50)]
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "answers.jsonl").write_text(lines_of(grid))
    marks += ["needles grid full", "runs mpic-16: run", "runs mpic-16: run:world-card@2,3"]
    path = tmp_path / "report.md"
    made = "".join(f"<!-- made: {mark} -->\nold\n<!-- end -->\n" for mark in marks)
    path.write_text(f"Before\n{made}After\n")
    assert fill(path) == len(marks)
    text = path.read_text()
    assert text.startswith("Before\n") and text.endswith("After\n") and "old" not in text
    assert "| world-card | 4 | 100.0 | +25.0 [+0.0, +66.7] |" in text
    assert "| run | 4 | 2.0 |" in text and "| run, 2, 3 chunks | 4 | 2.0 |" in text
    assert "`full`:\n\n| depth | 600 |" in text and "| 50 % | 100 |" in text
    assert fill(path) == len(marks) and path.read_text() == text


WRONG = ["", "nothing run", "losses", "losses run"]
WRONG += ["losses run:world-image", "losses run:world-card@9", "counts speed run", "needles run"]


@pytest.mark.parametrize("mark", WRONG)
def test_a_mark_that_cannot_be_filled_is_refused_and_changes_nothing(tmp_path, mark):
    path, text = tmp_path / "report.md", f"<!-- made: {mark} -->\n<!-- end -->\n"
    path.write_text(text)
    with pytest.raises(BadRequest):
        fill(path)
    assert path.read_text() == text


def test_a_policy_that_lacks_a_task_is_left_out_where_numbers_of_chunks_are_compared():
    """Its mean would be over other questions: here it answered only the easy task, and would look better than
    ``full``."""
    both = [
        one
        for chunks in (2, 4)
        for task, right in (("world-card", [1, 1]), ("world-image", [0, 1]))
        for policy in ("full", "reuse", "mpic-16")
        if (policy, task) != ("mpic-16", "world-image")
        and (policy, task, chunks) != ("reuse", "world-image", 4)
        for one in answers(policy, right, task, chunks)
    ]
    assert count_table(both, "score") == [
        ["chunks", "full", "reuse", "mpic-16"],
        ["2", "75.0", "75.0", ""],
        ["4", "75.0", "", ""],
    ]
    figure = Figure()
    by_chunks(figure, both)
    for axes in figure.axes:
        assert [line.get_label() for line in axes.get_lines()] == ["full"]
    assert count_table(both, "lost") == [
        ["chunks", "questions", "full", "reuse", "mpic-16"],
        ["2", "4", "75.0", "+0.0 [+0.0, +0.0]", ""],
        ["4", "4", "75.0", "", ""],
    ]
    card = [one for one in both if one.task == "world-card"]
    assert count_table(card, "score")[1] == ["2", "100.0", "100.0", "100.0"]


def uneven():
    """``mpic-16`` answered only the easy cell, where everybody is right."""
    easy, hard = {"chunks": 2}, {"chunks": 4}
    return [
        *answers("full", [1] * 4, **easy),
        *answers("full", [1, 1, 0, 0], **hard),
        *answers("reuse", [1] * 4, **easy),
        *answers("reuse", [1, 0, 0, 0], **hard, ttft_ms=0.5, flops=0.5),
        *answers("mpic-16", [1] * 4, **easy, ttft_ms=0.1, flops=0.1),
    ]


def test_a_policy_that_lacks_a_cell_is_marked_and_neither_ranked_nor_advised_nor_drawn():
    found = compare_policies(uneven())
    assert [(one.policy, one.complete) for one in found] == [
        ("full", True),
        ("reuse", True),
        ("mpic-16", False),
    ]
    rows = summary_table(found)[1:]
    assert [row[0] for row in rows] == ["full", "reuse", "mpic-16 (1 of 2 cells)"]
    assert "mpic-16" not in advice(found) and "No policy" in advice(found)
    figure = Figure()
    tradeoff(figure, found)
    assert "mpic-16" not in figure.axes[-1].get_legend_handles_labels()[1]
    figure = Figure()
    by_task(figure, {"world-card": found})
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["full", "reuse"]


def test_points_lost_on_a_task_are_empty_where_a_policy_lacks_one_of_its_cells():
    head, task, every = loss_table(uneven())
    assert head[3:] == ["reuse", "mpic-16"]
    assert task[3].startswith("+12.5") and task[4] == every[4] == ""


def test_a_report_says_which_policies_lack_a_cell(tmp_path):
    (tmp_path / "answers.jsonl").write_text(lines_of([replace(a, answer_tokens=1) for a in uneven()]))
    (tmp_path / "run.json").write_text('{"model": "m"}')
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "mpic-16 did not answer every cell" in text and "| mpic-16 (1 of 2 cells) |" in text


def test_needles_of_two_tasks_have_maps_of_their_own(tmp_path):
    grid = [
        PolicyAnswer(task, 0, "600@50#0", "full", scores={"contains": value, "em": value})
        for task, value in (("niah", 1.0), ("world-niah", 0.0))
    ]
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "answers.jsonl").write_text(lines_of(grid))
    found = needle_scores(grid)
    assert [next(iter(scores.values())) for scores in found.values()] == [100, 0]
    page = tmp_path / "page.md"
    page.write_text("<!-- made: needles grid full -->\n<!-- end -->\n")
    fill(page)
    assert "`full, niah`:" in page.read_text() and "`full, world-niah`:" in page.read_text()


def test_tasks_with_different_numbers_of_chunks_are_drawn_each_by_itself():
    parts = [("world-card", 1), ("world-image", 4), ("world-image", 8)]
    mixed = [
        one for policy in ("full", "reuse") for task, n in parts for one in answers(policy, [1, 0], task, n)
    ]
    figure = Figure()
    by_chunks(figure, mixed)
    assert "each task" in figure.get_suptitle()
    for axes in figure.axes:
        drawn = [list(line.get_xdata()) for line in axes.get_lines()]
        assert drawn == [[1], [4, 8], [1], [4, 8]]
        assert axes.get_legend_handles_labels()[1] == ["full", "reuse"]  # each is named once
        assert all(tick == int(tick) for tick in axes.get_xticks())


def test_times_are_compared_over_the_tasks_that_full_has_times_of():
    """Questions that are asked several at once have no times."""
    tasks = ("world-card", "world-image")
    full, reuse = ({task: answers(policy, [1], task) for task in tasks} for policy in ("full", "reuse"))
    every = [one for policy in (full, reuse) for found in policy.values() for one in found]
    full["world-image"][0].ttft_ms, reuse["world-image"][0].ttft_ms = None, 9
    assert count_table(every, "ttft")[1] == ["2", "1.0", "1.0"]
    full["world-image"][0].ttft_ms, reuse["world-image"][0].ttft_ms = 9, None
    assert count_table(every, "ttft")[1] == ["2", "5.0", ""]


def test_counts_that_no_task_has_all_of_are_refused():
    with pytest.raises(BadRequest, match="each of 1, 2 chunks"):
        count_table(
            [*answers("full", [1], chunks=1), *answers("full", [1], task="world-image", chunks=2)], "score"
        )


def test_counts_of_another_kind_are_refused():
    with pytest.raises(BadRequest, match="speed"):
        count_table(answers("full", [1]), "speed")
