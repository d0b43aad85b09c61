"""``mpic demo``: start the server, upload the samples, ask, compare the policies' answers.

The samples are described by ``data/samples/manifest.json``::

    {"files": [{"path": "tower.png", "handle": "TOWER", "kind": "image"}, ...],
     "questions": [{"id": "one-image", "kind": "image", "expected": "red",
                    "messages": [{"role": "user", "content": "Which colour has IMAGE#TOWER?"}]}, ...]}

Every policy has a user of its own, so that it meets an empty prefix cache and compiled chunks that are on disk alone:
the server is started once for the uploads and once more for the questions. Every question is asked, and then every
question again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mpic.client import MPIC
from mpic.client.types import File, Health
from mpic.errors import MPICError
from mpic.keys import KeyStore

MUST_BE_RIGHT = "mpic-16"
START_SECONDS = 600
POOL_BYTES = 256 << 20  # plenty for the samples, and quick to set up
PASSES = ("first", "again")
LEGEND = (
    "ms: time to the first token (in the totals: the median). first: asked after a restart, so a chunk comes from disk "
    "when it is first linked. again: the same question once more, when the prompt's own prefix is cached too; prefix: "
    "tokens found that way. reused of: tokens of images and documents that were linked as compiled, of all of them."
)


class StartFailed(MPICError):
    """The server ended before it answered."""

    code = "server_failed"


@dataclass(frozen=True)
class DemoAnswer:
    """One answer under one policy. Times in milliseconds; ``tiers`` are where the chunks' KV came from."""

    question: str
    policy: str
    turn: str
    answer: str
    right: bool
    ttft_ms: float
    total_ms: float
    prompt_tokens: int
    reused: int
    recomputed: int
    prefix_hit: int
    compiled: int
    tiers: tuple[str, ...]


def run(
    policies: Sequence[str],
    model: str | None = None,
    samples: Path | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
    engine: str = "native",
    quantize: str = "",
) -> int:
    """Runs the demo; the result is the process's exit status."""
    flags = ("--engine", engine, *(("--quantize", quantize) if quantize else ()))
    console = console or Console()
    folder = samples or Path(str(files("mpic.data") / "samples"))
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    questions = manifest["questions"]
    asked: list[DemoAnswer] = []
    policies = list(dict.fromkeys(policies))
    with tempfile.TemporaryDirectory(prefix="mpic-demo-") as data_dir:
        keys = make_users(Path(data_dir), policies)
        with console.status("starting a server and uploading the samples"):
            with running_server(Path(data_dir), model, *flags) as (url, seconds):
                for key in keys.values():
                    with MPIC(url, key) as client:
                        health = client.health()
                        uploaded = upload_samples(client, folder, manifest["files"])
        console.print(_what_runs(health, seconds), highlight=False)
        console.print(_uploads(uploaded))
        with console.status("starting it again, and asking"):
            with running_server(Path(data_dir), model, *flags) as (url, seconds):
                console.print(f"started again in {seconds:.1f} s, so that all is on disk", highlight=False)
                for policy, key in keys.items():
                    began = time.monotonic()
                    with MPIC(url, key) as client:
                        for turn in PASSES:
                            asked += [ask(client, question, policy, turn) for question in questions]
                    took = time.monotonic() - began
                    console.print(f"{policy}: everything asked twice in {took:.1f} s", highlight=False)
    for block in _answers(questions, asked, policies):
        console.print(block, highlight=False)
    console.print()
    console.print(_totals(asked, policies))
    console.print(LEGEND, style="dim")
    if json_path is not None:
        body = {
            "model": health.model.model_dump(),
            "files": [f.model_dump() for f in uploaded],
            "questions": questions,
        }
        body["right"] = {p: sum(a.right for a in asked if a.policy == p) for p in policies}
        body["answers"] = [asdict(a) for a in asked]
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return _verdict(console, asked)


def make_users(data_dir: Path, policies: Sequence[str]) -> dict[str, str]:
    """Makes a user for each policy, because caches are never shared by users; returns their API keys by policy."""
    with closing(KeyStore(data_dir)) as store:
        return {policy: store.create(f"user-{number}")[0] for number, policy in enumerate(policies)}


def upload_samples(client: MPIC, folder: Path, entries: list[dict[str, Any]]) -> list[File]:
    """Uploads the manifest's files and wait until each is compiled."""
    made = [client.files.create(folder / entry["path"], entry["handle"]) for entry in entries]
    return [client.files.wait(file.id) for file in made]


def ask(client: MPIC, question: dict[str, Any], policy: str, turn: str) -> DemoAnswer:
    """Asks one question under one policy."""
    answer = client.chat.completions.create(
        question["messages"], policy=policy, max_tokens=question.get("max_tokens", 32)
    )
    usage, ours = answer.usage, answer.usage.mpic
    return DemoAnswer(
        question=question["id"],
        policy=policy,
        turn=turn,
        answer=answer.text.strip(),
        right=same(answer.text, question["expected"]),
        ttft_ms=ours.ms.ttft,
        total_ms=ours.ms.total,
        prompt_tokens=usage.prompt_tokens,
        reused=ours.tokens.reused,
        recomputed=ours.tokens.recomputed,
        prefix_hit=ours.tokens.prefix_hit,
        compiled=ours.tokens.compiled,
        tiers=tuple(chunk.tier for chunk in ours.chunks),
    )


def same(answer: str, expected: str) -> bool:
    """Returns whether two answers are equal but for case, surrounding space and a full stop."""
    return answer.strip().rstrip(".").casefold() == expected.strip().rstrip(".").casefold()


@contextmanager
def running_server(data_dir: Path, model: str | None = None, *flags: str) -> Iterator[tuple[str, float]]:
    """Runs ``mpic serve`` as a process of its own on a free port; yields its URL and the seconds it took to start.

    Raises:
        StartFailed: it ended or printed nothing; the message holds the end of its log.
    """
    command = [
        sys.executable,
        "-m",
        "mpic.cli",
        "serve",
        "--port",
        "0",
        "--json",
        "--data-dir",
        str(data_dir),
    ]
    command += ["--log-level", "warning", "--pool-bytes", str(POOL_BYTES)]
    command += [*(["--model", model] if model else []), *flags]
    started = time.monotonic()
    log_path = data_dir / "server.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    too_late = threading.Timer(START_SECONDS, process.kill)
    too_late.start()
    try:
        line = process.stdout.readline()
        if not line:
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-20:])
            raise StartFailed(f"the server did not start:\n{tail}")
        too_late.cancel()
        yield json.loads(line)["url"], time.monotonic() - started
    finally:
        too_late.cancel()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


# ---- what is printed


def _what_runs(health: Health, seconds: float) -> str:
    model = health.model
    where = f"{model['device']} {model['dtype']}, attention {model['attention']}"
    if model["details"].get("engine") == "vllm":
        where = f"vLLM {model['details']['vllm']}, {where}"
    return f"{model['name']} ({model['family']}, {where}), started in {seconds:.1f} s"


def _uploads(uploaded: list[File]) -> Table:
    table = Table(title="Compiled once", title_justify="left", box=SIMPLE, padding=(0, 1))
    for name, side in (("upload", "left"), ("tokens", "right")) * 2:  # two uploads a line
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    cells = [(f.mention, str(f.tokens)) for f in uploaded]
    for pair in zip_longest(cells[::2], cells[1::2], fillvalue=("", "")):
        table.add_row(*pair[0], *pair[1])
    return table


def _text(messages: list[dict[str, Any]]) -> str:
    """Returns the conversation as a person would read it."""
    return " → ".join(_content_text(m["content"]) for m in messages)


def _content_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return " ".join(p.get("text") or f"{p['type'].upper()}#{p.get('handle', '?')}" for p in content)


def _answers(
    questions: list[dict[str, Any]], asked: list[DemoAnswer], policies: Sequence[str]
) -> Iterator[Any]:
    """Yields the policies' answers question by question."""
    for number, question in enumerate(questions, 1):
        text = f"\n[bold]{number}. {question['id']}[/]: {escape(_text(question['messages']))}"
        yield f"{text}\n[dim]expected:[/] {escape(question['expected'])}"
        table = Table(box=None, padding=(0, 1), header_style="dim", expand=True)
        for name, width in (("policy", 12), ("", 1), ("answer", None)):
            table.add_column(name, width=width, ratio=None if width else 1)
        for name, width in (("first ms", 8), ("again", 6), ("reused of", 9)):
            table.add_column(name, justify="right", width=width)
        for policy in policies:
            first, again = (_find(asked, question["id"], policy, turn) for turn in PASSES)
            answer = first.answer if first.answer == again.answer else f"{first.answer} | {again.answer}"
            table.add_row(
                policy,
                "[green]✓[/]" if first.right and again.right else "[red]✗[/]",
                escape(answer) or "[dim](nothing)[/]",
                f"{first.ttft_ms:.1f}",
                f"{again.ttft_ms:.1f}",
                f"{first.reused}/{first.reused + first.recomputed}",
            )
        yield table


def _totals(asked: list[DemoAnswer], policies: Sequence[str]) -> Table:
    table = Table(Column("policy", no_wrap=True), title="All questions", title_justify="left", box=SIMPLE)
    for name in ("right", "first ms", "again ms", "prompt", "reused", "recomp.", "prefix"):
        table.add_column(name, justify="right")
    for policy in policies:
        first, again = ([a for a in asked if a.policy == policy and a.turn == turn] for turn in PASSES)
        right = sum(a.right and b.right for a, b in zip(first, again))
        table.add_row(
            policy,
            f"{right}/{len(first)}",
            f"{statistics.median(a.ttft_ms for a in first):.1f}",
            f"{statistics.median(a.ttft_ms for a in again):.1f}",
            *(str(sum(getattr(a, n) for a in first)) for n in ("prompt_tokens", "reused", "recomputed")),
            str(sum(a.prefix_hit for a in again)),
        )
    return table


def _find(asked: list[DemoAnswer], question: str, policy: str, turn: str) -> DemoAnswer:
    return next(a for a in asked if (a.question, a.policy, a.turn) == (question, policy, turn))


def _verdict(console: Console, asked: list[DemoAnswer]) -> int:
    must = [a for a in asked if a.policy == MUST_BE_RIGHT]
    missed = sorted({a.question for a in must if not a.right})
    if missed:
        console.print(f"[red]{MUST_BE_RIGHT} missed: {', '.join(missed)}[/]")
        return 1
    if must:
        console.print(f"[green]{MUST_BE_RIGHT} gave every expected answer.[/]")
    return 0
