"""The evaluation of retrieval, on a few questions of the bundled set."""

from io import StringIO

from rich.console import Console
from small_models import SMALL

from mpic_lab.eval.retrieval import evaluate, print_report


def test_it_reports_recall_answers_and_searches():
    report = evaluate(limit=2, model=str(SMALL))
    assert report["entries"] == 200 and report["embedder"]["dimension"] == 128
    recall = {(row["task"], row["form"]): row for row in report["recall"]}
    assert recall["text->text", "search"]["recall@1"] > 0.9 and recall["text->text", "all"]["queries"] == 6
    assert all(0 <= row["recall@1"] <= row["recall@5"] <= 1 for row in report["recall"])
    facts = next(row for row in report["answers"] if row["task"] == "text->text")
    assert facts["no library"] == 0 and facts["auto"] == facts["right reference"] == facts["searched"] == 1
    pictures = next(row for row in report["answers"] if row["task"] == "text->image")
    assert pictures["found the right one"] == 1 and pictures["auto"] == pictures["right reference"]
    assert report["searches"][-1]["task"] == "all" and report["searches"][-1]["searched"] < 0.2
    asking = {row["task"]: row for row in report["asking"]}
    assert asking["call"]["recall"] == asking["call"]["precision"] == 1
    assert asking["prompted"]["recall"] == 0 and asking["prompted"]["precision"] is None
    least = [asking[f"confidence {bound}"]["recall"] for bound in (0.5, 0.7, 0.9)]
    assert least == sorted(least) and least[-1] > 0
    shown = StringIO()
    print_report(report, Console(file=shown, width=300))
    assert "recall@5 of its kind" in shown.getvalue() and "found the right one" in shown.getvalue()
