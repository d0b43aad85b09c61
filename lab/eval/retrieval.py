"""Evaluates retrieval on the bundled reference set of a model's generation: whether references are found, whether the
model searches, and whether the answers are correct.

*Recall* of the retriever over 200 entries, against the generator's truth. *Answers* to the questions whose facts are
only in the library (``form`` question of its ``queries.jsonl``), greedy, exact match: without a library,
with ``auto``, and with the right reference in the prompt where the model expects one. *Searches*: how often the model
searches when it must (those questions) and when it need not (held-out questions about the context). *Asking*: the same
for each trigger (``mpic.retrieval.trigger``): *recall* is the share of those questions that are searched for, and
*precision* the share of the searches that had to be made. There, with a trigger other than the model's own call, the
token that begins one is never drawn, as if the model had none.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from mpic.api.requests import RetrievalOptions
from mpic.config import EngineConfig, RetrievalConfig, bundled_model
from mpic.data.bundled import generation_for
from mpic.engine import load_engine
from mpic.engine.base import Delta, Engine, GenerationRequest, Sampling
from mpic.engine.native import engine as module
from mpic.engine.native.sampling import Drawing
from mpic.library import Library
from mpic.library.copies.bulk_import import LibraryTarget, import_references
from mpic.link import parse_policy
from mpic.model.dtype_choice import dtype_for_results
from mpic.model.load import choose_device
from mpic.prompt import ChatTemplate, build_prompt
from mpic.prompt.calls import OPENS
from mpic.prompt.segments import Prompt
from mpic.retriever import Embedder, Query, Retriever, SearchHit
from mpic.server.resolver import LibraryResolver
from mpic.server.retrieval import (
    AutoRetrieval,
    Searcher,
    call_style,
    search_of,
    with_protocol,
    with_simulated_call,
)
from mpic_lab.generator import references
from mpic_lab.generator.client import content_part
from mpic_lab.generator.tasks import Generator
from mpic_lab.generator.worlds import WORLDS

TOP_KS = (1, 5)
CONTEXT_TASKS = ("image", "card", "biography", "needle", "compare", "mixed")
CONTEXT_QUESTIONS = 20
TOKENS = 32
ASKING: tuple[dict[str, Any], ...] = (
    {"trigger": "call"},
    {"trigger": "prompted"},
    *({"trigger": "confidence", "confidence": least} for least in (0.5, 0.7, 0.9)),
)


def evaluate(policy: str = "mpic-16", limit: int = 1000, model: str | None = None) -> dict[str, Any]:
    """Evaluate everything and return a report that can be written as JSON. This takes minutes on a CPU."""
    with tempfile.TemporaryDirectory(prefix="mpic-eval-") as data_dir:
        library = Library.open(Path(data_dir))
        dtype = dtype_for_results("auto", choose_device())
        config = EngineConfig(model=model or bundled_model(), dtype=dtype)
        engine, processor = load_engine(config, library.store)
        setup = RetrievalSetup(engine, library, ChatTemplate(processor), policy)
        entries, queries = references.load(setup.references)
        try:
            results = asyncio.run(
                import_references(setup.references / "references.jsonl", LibraryTarget(library.references))
            )
            assert all(result.outcome == "added" for result in results), results
            assert setup.retriever.flush(300)
            return {
                "entries": len(entries),
                "model": engine.info.name,
                "policy": policy,
                "embedder": setup.retriever.embedder.name._asdict(),
                "recall": recall(setup.retriever, queries, limit),
                "answers": answers(setup, _limited(queries, limit)),
                "searches": searches(setup, min(limit, CONTEXT_QUESTIONS)),
                "asking": asking(setup, _limited(queries, limit), min(limit, CONTEXT_QUESTIONS)),
            }
        finally:
            engine.close()
            setup.retriever.close()
            library.close()


def recall(retriever: Retriever, queries: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Return by task and form the share of queries whose true entry is among the first k, of all and of its kind
    only."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for query in queries:
        if len(groups[query["task"], query["form"]]) < limit:
            groups[query["task"], query["form"]].append(query)
            groups[query["task"], "all"].append(query)
    rows = []
    for (task, form), group in sorted(groups.items()):
        row: dict[str, Any] = {"task": task, "form": form, "queries": len(group)}
        kind = task.rpartition(">")[2]
        for name, filter in (("", None), (" of its kind", {"kind": kind})):
            ranks = [_rank(retriever, query, filter) for query in group]
            for k in TOP_KS:
                row[f"recall@{k}{name}"] = round(sum(rank < k for rank in ranks) / len(group), 4)
        rows.append(row)
    return rows


def _rank(retriever: Retriever, query: dict[str, Any], filter: dict[str, Any] | None) -> int:
    images = (Image.open(query["path"]).convert("RGB"),) if "path" in query else ()
    hits = retriever.search(Query(query.get("text", ""), images), max(TOP_KS), filter=filter)
    ids = [hit.reference.id for hit in hits]
    truth = f"ref_{query['truth']}"
    return ids.index(truth) if truth in ids else len(ids) + max(TOP_KS)


class RetrievalSetup:
    """An engine and a library, with several ways to ask.

    Attributes:
        generation: the generation of pictures and documents that suits the model.
        references: the folder of its reference set.
    """

    def __init__(self, engine: Engine, library: Library, template: ChatTemplate, policy: str) -> None:
        library.files.tokenize = library.references.tokenize = template.tokenize_document
        config = RetrievalConfig()
        self.generation = generation_for(engine.info.context_length)
        self.references = references.REFERENCES[self.generation]
        self.engine, self.library, self.template = engine, library, template
        self.policy = parse_policy(policy)
        self.style = call_style(template, config)
        self.retriever = Retriever(library, Embedder(config.embedder), config.duplicates)

    def plain(self, messages: list[dict[str, Any]]) -> GenerationRequest:
        """Return a request without a library."""
        resolver = LibraryResolver(self.library, "eval", 256)
        return self.request(build_prompt(messages, self.template, resolver))

    def request(self, prompt: Prompt) -> GenerationRequest:
        return GenerationRequest("eval", prompt, self.policy, Sampling(max_tokens=TOKENS), "eval")

    def auto(self, request: GenerationRequest, **options: Any) -> GenerationRequest:
        searching = Searcher(self.retriever, RetrievalOptions(mode="auto", **options))
        return replace(request, retrieval=AutoRetrieval(searching, self.template, self.style))

    def asks(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> GenerationRequest:
        """Return a request whose model, or the engine for it, asks as the options say."""
        searching = Searcher(self.retriever, RetrievalOptions(mode="auto", **options))
        text = "\n".join(texts_of(messages[-1]["content"]))
        search = search_of(searching, self.template, RetrievalConfig(), Query(text))
        if search.trigger == "prompted":
            messages = with_protocol(messages)
        request = self.plain(messages)
        sampling = replace(request.sampling, logprobs=0 if search.trigger == "confidence" else None)
        return replace(request, retrieval=search, sampling=sampling)

    def given(self, query: dict[str, Any], asked: str) -> GenerationRequest:
        """Return a request with the right reference in the prompt, at the place where the model expects the result of
        a search."""
        shelf = self.library.references
        hit = SearchHit(shelf.get(f"ref_{query['truth']}"), 1.0)
        prompt = self.plain([{"role": "user", "content": query["text"]}]).prompt
        return self.request(
            with_simulated_call(prompt, self.template, self.style, Query(asked), [hit], shelf)
        )

    def run(self, requests: Sequence[GenerationRequest]) -> list[Delta]:
        """Submit all requests at once; the engine batches them."""
        streams = [self.engine.submit(request) for request in requests]
        return [stream.result() for stream in streams]


def answers(setup: RetrievalSetup, queries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return shares of exact answers by kind of reference: without, with the right reference, and with ``auto``."""
    calls = {q["truth"]: q["text"] for q in references.load(setup.references)[1] if q["form"] == "search"}
    plain = [setup.plain([{"role": "user", "content": q["text"]}]) for q in queries]
    columns = {
        "no library": setup.run(plain),
        "right reference": setup.run([setup.given(q, calls[q["truth"]]) for q in queries]),
        "auto": setup.run([setup.auto(p) for p in plain]),
        "auto, top 5": setup.run([setup.auto(p, top_k=5) for p in plain]),
        "auto, kind known": setup.run(
            [
                setup.auto(p, filter={"kind": q["task"].rpartition(">")[2]})
                for p, q in zip(plain, queries, strict=True)
            ]
        ),
    }
    rows = []
    for task in (*sorted({q["task"] for q in queries}), "all"):
        at = [i for i, q in enumerate(queries) if task in (q["task"], "all")]
        row: dict[str, Any] = {"task": task, "questions": len(at)}
        for name, got in columns.items():
            row[name] = round(sum(got[i].text.strip() == queries[i]["answer"] for i in at) / len(at), 4)
        rounds = [columns["auto"][i].usage.retrieval for i in at]
        row["searched"] = round(sum(bool(r) for r in rounds) / len(at), 4)
        found = [
            any(c["reference_id"] == f"ref_{queries[i]['truth']}" for one in r for c in one.citations)
            for i, r in zip(at, rounds, strict=True)
        ]
        row["found the right one"] = round(sum(found) / len(at), 4)
        right = [columns["auto"][i].text.strip() == queries[i]["answer"] for i in at]
        had = [ok for ok, hit in zip(right, found, strict=True) if hit]
        row["auto when found"] = round(sum(had) / len(had), 4) if had else None
        rows.append(row)
    return rows


def searches(setup: RetrievalSetup, questions: int) -> list[dict[str, Any]]:
    """Return by task how often the model searches although the answer is in the context."""
    rows = []
    for task in CONTEXT_TASKS:
        got = setup.run([setup.auto(setup.plain(asked)) for asked in in_context(setup, task, questions)])
        rows.append(
            {
                "task": task,
                "questions": len(got),
                "searched": round(sum(bool(g.usage.retrieval) for g in got) / len(got), 4),
            }
        )
    total = sum(row["questions"] for row in rows)
    share = sum(row["searched"] * row["questions"] for row in rows) / total
    return [*rows, {"task": "all", "questions": total, "searched": round(share, 4)}]


def in_context(setup: RetrievalSetup, task: str, questions: int) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations about what is in them."""
    for seed in range(questions):
        (turn, *_) = Generator(50_000 + seed, "eval", world=WORLDS[setup.generation]).task(task, 2).turns
        yield [{"role": "user", "content": [content_part(part) for part in turn.user]}]


def asking(setup: RetrievalSetup, queries: Sequence[dict[str, Any]], questions: int) -> list[dict[str, Any]]:
    """Return by trigger how often a search is made where it must and where it need not."""
    must = [[{"role": "user", "content": query["text"]}] for query in queries]
    need_not = [asked for task in CONTEXT_TASKS for asked in in_context(setup, task, questions)]
    rows = []
    for options in ASKING:
        with muted(setup.template, OPENS) if options["trigger"] != "call" else nullcontext():
            got = setup.run([setup.asks(messages, options) for messages in must])
            spare = setup.run([setup.asks(messages, options) for messages in need_not])
        asked, too_often = (sum(bool(g.usage.retrieval) for g in some) for some in (got, spare))
        right = sum(g.text.strip() == q["answer"] for g, q in zip(got, queries, strict=True))
        rows.append(
            {
                "task": " ".join(map(str, options.values())),
                "recall": round(asked / len(got), 4),
                "precision": round(asked / (asked + too_often), 4) if asked + too_often else None,
                "asked in vain": round(too_often / len(spare), 4),
                "right answers": round(right / len(got), 4),
            }
        )
    return rows


@contextmanager
def muted(template: ChatTemplate, token: str) -> Iterator[None]:
    """Keep the native engine from drawing a token; its probability is 0."""
    banned = template.tokenizer.convert_tokens_to_ids(token)

    def drawing(logits: torch.Tensor, *rest: Any) -> Drawing:
        with torch.inference_mode():
            logits[:, banned] = float("-inf")
        return Drawing(logits, *rest)

    module.Drawing = drawing  # ty: ignore[invalid-assignment] (put back below)
    try:
        yield
    finally:
        module.Drawing = Drawing


def texts_of(content: str | Sequence[dict[str, Any]]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def _limited(queries: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Return the questions, at most ``limit`` of each task, evenly spread."""
    kept = []
    for task in sorted({q["task"] for q in queries}):
        group = [q for q in queries if q["task"] == task and q["form"] == "question"]
        step = max(1, len(group) // limit)
        kept += group[::step][:limit]
    return kept


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print the tables of tasks and figures, with the longer dimension as rows."""
    for name in ("recall", "answers", "searches", "asking"):
        rows = report[name]
        keys = [key for key in rows[0] if key not in ("task", "form")]
        lines = [["", *keys]]
        for row in rows:
            title = f"{row['task']} {row.get('form', '')}".strip()
            lines.append([title, *(_cell(row[key]) for key in keys)])
        if len(keys) > len(rows):
            lines = [list(column) for column in zip(*lines)]
        head, *rest = lines
        table = Table(
            title=f"{name} ({report['model']}, {report['policy']})", title_justify="left", box=SIMPLE
        )
        for i, text in enumerate(head):
            table.add_column(text, justify="right" if i else "left", no_wrap=not i)
        for line in rest:
            table.add_row(*line)
        console.print(table, markup=False)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if isinstance(value, float) else str(value)
