"""The page's facts about the server: policies with measurements, samples, figures."""

import re
from pathlib import Path

import pytest

from mpic.data.bundled import DEFAULT, SAMPLES, model_folder
from mpic.link import POLICIES, policy_names
from mpic.link.engines import PROVIDES
from mpic.webui import live, policies
from mpic.webui.plots import EXPLAINED, plots
from mpic.webui.samples import NAMES, PARAMETERS, QUESTIONS, sample_files, samples

ROOT = Path(__file__).parents[2]


def test_every_policy_the_server_has_is_explained_and_offered():
    forms = policy_names()
    assert all(policies.explain(form) for form in forms)
    offered = policies.offered(forms, "legolink-16")
    assert all(policies.explain(name) for name in offered)
    assert offered[0] == "legolink-16" and len(set(offered)) == len(offered)
    assert not [name for name in offered if re.search(r"-[KNR]$", name)]
    assert policies.explain("mpic-48") == "Recomputes the first 48 tokens of every image and document."
    assert policies.explain("something") == policies.explain("mpic-" + "9" * 5000) == ""


def test_only_policies_that_the_engine_supports_are_offered():
    forms = [policy.syntax for policy in POLICIES if policy.needs() <= PROVIDES["vllm"]]
    offered = policies.offered(forms, "mpic-16")
    assert "mpic-32" in offered and "cacheblend-15" not in offered and "reuse-2step" not in offered


def test_what_the_menu_says_was_measured_is_what_the_evidence_says():
    text = (ROOT / "docs" / "evidence" / "README.md").read_text(encoding="utf-8")
    table = text.partition(f"made: summary {DEFAULT} -->")[2].partition("<!-- end")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line
    ]
    columns = [rows[0].index(name) for name in ("policy", "lost", "FLOPs, full over it")]
    found = {}
    for row in rows[2:]:
        name, lost, fewer = (row[i] for i in columns)
        found[name] = (float(lost.split()[0]), float(fewer.split()[0]))
    assert found == policies.MEASURED


def test_the_samples_and_the_plots_that_are_shown_exist():
    for model in SAMPLES:
        assert [s.id for s in samples(model)] == [id for id, _, _ in QUESTIONS]
        assert sample_files(model).keys() == NAMES.keys()
    assert samples("llava-1.5-7b-hf") == () and sample_files("llava-1.5-7b-hf") == {}
    assert sample_files("large")["GRACE"] != sample_files("demo")["GRACE"]
    assert {"ttft", "flat", "memory", "decode"} <= {p.name for p in plots()} and "ttft" in EXPLAINED


@pytest.mark.parametrize("model", [name for name in PARAMETERS if model_folder(name).is_dir()])
def test_what_a_demo_model_is_said_to_know_is_what_its_card_says(model):
    card = (model_folder(model) / "README.md").read_text(encoding="utf-8")
    assert f"{PARAMETERS[model]} M parameters" in card
    assert "coloured shapes and digits, cards, biographies, codes" in card


METRICS = """
mpic_time_to_first_token_seconds_bucket{le="0.01"} 50.0
mpic_time_to_first_token_seconds_bucket{le="0.1"} 100.0
mpic_time_to_first_token_seconds_bucket{le="+Inf"} 100.0
mpic_requests_running 2.0
mpic_prompt_tokens_total{state="requested"} 1000.0
mpic_prompt_tokens_total{state="reused"} 600.0
mpic_prompt_tokens_total{state="prefix_hit"} 50.0
mpic_tier_bytes{tier="device"} 5e6
mpic_tier_budget{tier="device"} 1e7
mpic_tier_budget{tier="host"} 0.0
mpic_tier_budget{tier="remote"} 0.0
mpic_tier_chunks{tier="remote"} 3.0
mpic_evictions_total{tier="device",reason="room"} 3.0
"""


def test_the_panel_has_the_servers_own_figures():
    found = live.figures(METRICS)
    assert (found["running"], found["evictions"]) == (2, 3)
    assert (found["prompt_tokens"], found["reused_tokens"]) == (1000, 650)
    rounded = {name: round(ms) for name, ms in found["first_token_ms"].items()}
    assert rounded == {"p50": 10, "p90": 82, "p99": 98}
    assert found["tiers"] == [
        {"tier": "device", "bytes": 5_000_000, "budget": 10_000_000, "chunks": 0},
        {"tier": "remote", "bytes": 0, "budget": 0, "chunks": 3},
    ]
    assert live.figures("")["first_token_ms"] == {"p50": None, "p90": None, "p99": None}


def test_a_percentile_beyond_the_last_bucket_is_its_bound():
    assert live.percentile([(0.1, 1.0), (float("inf"), 2.0)], 99) == 0.1
    assert live.percentile([(0.1, 0.0), (float("inf"), 0.0)], 50) is None and live.percentile([], 50) is None
