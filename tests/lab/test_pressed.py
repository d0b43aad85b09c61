"""The table of compressed packets is paired by question, and names what a run lacks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mpic.errors import BadRequest
from mpic.packet.adapter import PLACE
from mpic_lab.eval.answers import PolicyAnswer, lines_of
from mpic_lab.eval.compare import cells_of, compare_policies
from mpic_lab.eval.config import load_eval_config
from mpic_lab.eval.evidence import fill
from mpic_lab.eval.linking import parse_linking
from mpic_lab.eval.pressed import HEADER, lost_between, pressed_table

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
RIGHT = {
    "full": [1, 1, 1, 1],
    "packet": [1, 1, 1, 0],
    "single": [1, 1, 1, 1],
    "packet+cur-10-0": [1, 1, 0, 0],
    "packet+cur-10-4-2": [1, 0, 1, 0],
    "single+cur-10-0": [1, 1, 1, 1],
    "packet+cur-50-0": [0, 1, 0, 0],
    "packet+cur-50-4-2": [1, 1, 0, 0],
    "single+cur-50-0": [0, 1, 1, 1],
}


def answers(policy, right, task="world-card", kv_bytes=0):
    return [
        PolicyAnswer(task, 2, str(i), policy, "yes", scores={"em": float(r)}, kv_bytes=kv_bytes)
        for i, r in enumerate(right)
    ]


def run():
    made = (answers(*one, kv_bytes=1000 * number) for number, one in enumerate(RIGHT.items()))
    return [answer for part in made for answer in part]


def test_a_row_has_every_way_beside_what_it_is_compared_with():
    head, plain, tenth, half, every, total = pressed_table(run(), "4-2", ["cur"])
    assert total == ["all", *every[1:]]
    assert head == HEADER
    assert plain == ["none", "0", "1", "75.0", "", "", "", "2", "100.0", ""]
    assert (tenth[:4], tenth[5], tenth[7:9]) == (["`cur`", "10", "3", "50.0"], "50.0", ["5", "100.0"])
    assert (half[:4], half[5], half[7:9]) == (["`cur`", "50", "6", "25.0"], "50.0", ["8", "75.0"])
    assert (
        tenth[4].startswith("+25.0 [") and tenth[6].startswith("+0.0 [-") and tenth[9] == "+0.0 [+0.0, +0.0]"
    )
    assert half[4].startswith("+50.0 [") and half[6].startswith("-25.0 [") and half[9].startswith("+25.0 [")
    assert every[:4] == ["`cur`", "all", "4", "37.5"] and every[6].startswith("-12.5 [")


def test_a_pair_of_a_policy_and_full_is_what_every_other_table_says():
    found = [
        *run(),
        *answers("full", [1, 0, 1], "world-needle"),
        *answers("packet", [0, 0, 1], "world-needle"),
    ]
    kept = [a for a in found if a.policy in ("full", "packet")]
    (expected,) = (one.lost for one in compare_policies(kept) if one.policy == "packet")
    assert lost_between(cells_of(kept), [("packet", "full")]) == expected


def test_shares_together_are_averaged_in_each_question_and_not_counted_as_more_questions():
    cells = cells_of(run())
    pair = ("packet+cur-50-0", "packet")
    assert lost_between(cells, [pair] * 5) == lost_between(cells, [pair])
    both = lost_between(cells, [("packet+cur-10-0", "packet"), pair])
    assert both.points == 37.5
    mean = np.array([0.5, 0, 1, 0]) * 100
    assert both.points == mean.mean() and 0 <= both.low < both.points < both.high <= 100


@pytest.mark.parametrize(
    ("filler", "press", "named"),
    [
        ("8-8", "cur", r"no answers of packet\+cur-10-8-8 to every task"),
        ("4-2", "tova", r"no packet\+tova-R-0"),
    ],
)
def test_what_a_run_lacks_is_named(filler, press, named):
    with pytest.raises(BadRequest, match=named):
        pressed_table(run(), filler, [press])


@pytest.mark.parametrize("policy", ["packet", "single", "single+cur-10-0"])
def test_a_policy_whose_bytes_are_shown_first_is_named_too(policy):
    kept = [answer for answer in run() if answer.policy != policy]
    with pytest.raises(BadRequest, match=rf"no answers of {re.escape(policy)} to every task"):
        pressed_table(kept, "4-2", ["cur"])


def test_a_report_is_filled_with_it(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "answers.jsonl").write_text(lines_of(run()))
    page = tmp_path / "page.md"
    page.write_text("<!-- made: pressed run 4-2 cur -->\n<!-- end -->\n")
    assert fill(page) == 1 and "| `cur` | 50 | 6 | 25.0 |" in page.read_text()


@pytest.mark.parametrize("name", ["pressed-packets", "pressed-packets-plain"])
def test_keep_filler_of_the_evidence_protects_the_whole_adapter_and_no_other_token(name):
    """The names of presses say numbers, so those in the evidence must be the bundled adapters' own."""
    config = load_eval_config(EVIDENCE / f"{name}.toml")
    data = (Path(config.model) / PLACE).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    lengths = tuple(header[part]["shape"][0] for part in ("header", "trailer"))
    assert lengths == (8, 8)
    ways = {(m[1], m[2]) for p in config.policies if (m := re.fullmatch(r"packet\+(\w+)-(\d+)-0", p))}
    assert len(ways) == 20 and len(config.policies) == 3 + 3 * 20 + 4
    for press, share in ways:
        for protected in ("0", "{}-{}".format(*lengths)):
            assert parse_linking(f"packet+{press}-{share}-{protected}").name in config.policies
        assert f"single+{press}-{share}-0" in config.policies
