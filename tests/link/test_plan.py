"""Plans: every token is computed or mapped exactly once, rows come after what they see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpic.errors import UnknownPolicy
from mpic.link import POLICIES, Need, SegmentShape, make_plan, parse_policy, policies_page, policy_names

NAMES = ["full", "prefix", "reuse", "reuse-2step", "mpic-0", "mpic-7", "mpic-500", "legolink-3", "legolink-0"]
NAMES += ["attnlink-5", "attnlink-0", "block-1", "random-30", "random-0", "random-100"]
NAMES += ["cacheblend-15", "cacheblend-0", "cacheblend-100"]
NAMES += ["packet", "packet-0", "packet-7", "a3-15", "a3-100"]
segments = st.lists(
    st.builds(lambda n, c: SegmentShape(n, max(1, n // 2) if c else n, c), st.integers(1, 40), st.booleans()),
    min_size=1,
    max_size=8,
)


@given(segments, st.sampled_from(NAMES))
def test_every_token_is_computed_or_mapped_exactly_once_and_in_order(shapes, name):
    plan = make_plan(shapes, parse_policy(name))
    covered = []
    for own in plan.own_ranges:
        covered += range(own.start, own.start + own.hi - own.lo)
    for span in plan.spans:
        start = plan.places[span.source].start
        covered += range(start + span.lo, start + span.hi)
    assert sorted(covered) == list(range(plan.length))
    assert plan.own == sum(own.hi - own.lo for own in plan.own_ranges)
    assert not plan.two_step or all(span.row == plan.own - 1 for span in plan.spans if plan.own)
    for span in () if plan.two_step else plan.spans:
        end = plan.places[span.source].start + span.hi  # rows before `row` precede the span, others follow it
        indices = [own.start + i for own in plan.own_ranges for i in range(own.hi - own.lo)]
        assert all(index < end for index in indices[: span.row])
        assert all(index >= end for index in indices[span.row :])


@pytest.mark.parametrize("name", NAMES)
def test_a_policys_name_parses_back_to_it(name):
    assert parse_policy(parse_policy(name).name) == parse_policy(name)


def test_mpic_recomputes_the_head_of_every_chunk_and_legolink_not_that_of_a_leading_one():
    shapes = [SegmentShape(20, 20, True), SegmentShape(3, 3, False), SegmentShape(20, 20, True)]
    assert [(s.lo, s.hi) for s in make_plan(shapes, parse_policy("mpic-8")).spans] == [(8, 20), (8, 20)]
    assert [(s.lo, s.hi) for s in make_plan(shapes, parse_policy("legolink-8")).spans] == [(0, 20), (8, 20)]


def test_attnlink_recomputes_both_sides_of_a_boundary_and_block_whole_pages():
    shapes = [SegmentShape(40, 40, True), SegmentShape(6, 6, True), SegmentShape(1, 1, False)]
    assert [(s.lo, s.hi) for s in make_plan(shapes, parse_policy("attnlink-9")).spans] == [(5, 36)]
    assert [(s.lo, s.hi) for s in make_plan(shapes, parse_policy("block-2")).spans] == [(32, 40)]


def test_random_recomputes_the_same_share_every_time():
    shapes = [SegmentShape(200, 200, True), SegmentShape(1, 1, False)]
    plan = make_plan(shapes, parse_policy("random-15"))
    assert plan == make_plan(shapes, parse_policy("random-15"))
    assert plan.own == 30 + 1


def test_a_chunks_base_counts_rotary_positions_not_tokens():
    shapes = [SegmentShape(5, 5, False), SegmentShape(64, 8, True), SegmentShape(64, 8, True)]
    plan = make_plan(shapes, parse_policy("reuse"))
    assert [span.base for span in plan.spans] == [5, 13]
    assert plan.rotary_length == 21


UNKNOWN = ["", "mpic", "mpic--1", "mpic-1.5", "MPIC-3", "mpic-99999999", "full-3", "nonsense", "random-101"]


@pytest.mark.parametrize("text", [*UNKNOWN, "samkv-small"])
def test_an_unknown_policy_is_refused_with_the_list_of_those_there_are(text):
    with pytest.raises(UnknownPolicy) as caught:
        parse_policy(text)
    assert "at most" in caught.value.message or all(name in caught.value.message for name in policy_names())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_says_all_that_is_shown_of_it(policy):
    assert policy.summary.endswith(".") and bool(policy.examples) == bool(policy.parameters())
    for text in policy.examples or [policy.syntax]:
        assert type(parse_policy(text)) is policy and parse_policy(text).name == text
        shown = parse_policy(text).explanation
        assert shown == policy.summary if not policy.parameters() else shown != policy.summary
    for number in policy.parameters():
        assert policy.parse(policy.syntax.replace(number.name.upper(), str(number.metadata["most"])))


def test_leading_zeros_do_not_make_another_policy():
    assert parse_policy("legolink-00") == parse_policy("legolink-0")
    assert parse_policy("mpic-08").name == "mpic-8"


def test_the_table_of_policies_in_the_documentation_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "policies.md"
    assert page.read_text() == policies_page.document(), "python tools/docs/generate.py"


def test_what_an_engine_must_do_for_a_policy_follows_from_its_class():
    needs = {"mpic-16": set(), "legolink-0": {Need.SINK}, "reuse-2step": {Need.TWO_STEPS}}
    needs["cacheblend-5"] = {Need.DECISION}
    assert {name: parse_policy(name).needs() for name in needs} == needs


def test_cacheblend_recomputes_the_tokens_that_deviate_most_over_all_chunks():
    policy = parse_policy("cacheblend-30")
    near, far = torch.zeros(10), torch.zeros(10)
    near[3], far[[0, 1, 2, 8, 9]] = 1.0, torch.tensor([5.0, 6.0, 7.0, 8.0, 9.0])
    assert policy.choose([near, far]) == [((3, 4),), ((0, 3), (8, 10))]
    assert policy.choose([torch.zeros(10), torch.zeros(10)]) == [((0, 6),), ()]


def test_the_tokens_of_an_image_that_attends_to_itself_are_a_block_and_see_the_spans_behind_them():
    shapes = [
        SegmentShape(3, 3, False),
        SegmentShape(20, 20, True, bidirectional=True),
        SegmentShape(4, 4, False),
    ]
    plan = make_plan(shapes, parse_policy("mpic-8"))
    assert plan.blocks == ((3, 11),)
    assert [(s.row, s.ahead, s.first(False), s.first(True)) for s in plan.spans] == [(11, 3, 11, 3)]
    assert make_plan(shapes, parse_policy("full")).blocks == ((3, 23),)
    assert make_plan(shapes, parse_policy("reuse")).blocks == ()
    assert make_plan(shapes, parse_policy("full")).pairs() == 27 * 28 // 2 + 20 * 19 // 2


def test_a_prompt_that_attends_to_itself_is_one_block_that_sees_every_span_and_keeps_no_prefix():
    shapes = [SegmentShape(3, 3, False), SegmentShape(20, 20, True), SegmentShape(4, 4, False)]
    plan = make_plan(shapes, parse_policy("mpic-8"), whole_prompt=True)
    assert plan.blocks == ((0, 15),) and [s.ahead for s in plan.spans] == [0] and not plan.prefix
    two = make_plan(shapes, parse_policy("reuse-2step"), whole_prompt=True)
    assert two.blocks == ((0, 6),) and [s.first(True) for s in two.spans] == [6]
