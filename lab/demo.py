"""``mpic demo``: start the server, upload the samples, ask, compare the policies' answers.

The samples are described by the ``manifest.json`` of their folder (``data/samples-large``)::

    {"files": [{"path": "tower.png", "handle": "TOWER", "kind": "image"}, ...],
     "questions": [{"id": "one-image", "kind": "image", "expected": "red",
                    "messages": [{"role": "user", "content": "Which colour has IMAGE#TOWER?"}]}, ...]}

Every policy has a user of its own, so that it meets an empty prefix cache and compiled chunks that are on disk only:
the server is started once for the uploads and once more for the questions. Every question is asked, and then every
question again.

Questions of the kind ``eight-images`` are for the headline (``demo_answers.py``): the policies are asked them in turn,
one request at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from mpic.client import MPIC
from mpic.client.types import File
from mpic.data.bundled import DEFAULT, samples_folder
from mpic.errors import MPICError
from mpic.keys import KeyStore
from mpic_lab import demo_tables
from mpic_lab.demo_answers import EIGHT_IMAGES, MUST_BE_RIGHT, PASSES, WARM, DemoAnswer, headline_of

START_SECONDS = 600
POOL_BYTES = 1 << 30  # room for the samples of three policies' users and the longest prompts


class StartFailed(MPICError):
    """The server ended before it answered requests."""

    code = "server_failed"


class ServerProcess(NamedTuple):
    """A running server: the id of its process, its address, and the file with its stderr."""

    pid: int
    url: str
    log: Path


def run(
    policies: Sequence[str],
    model: str | None = None,
    samples: Path | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
    engine: str = "native",
    quantize: str = "",
) -> int:
    """Run the demo; the result is the process's exit status."""
    flags = ("--engine", engine, *(("--quantize", quantize) if quantize else ()))
    console = console or Console()
    folder = samples or samples_folder(model or DEFAULT)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    questions = manifest["questions"]
    policies = list(dict.fromkeys(policies))
    with tempfile.TemporaryDirectory(prefix="mpic-demo-") as data_dir:
        keys = make_users(Path(data_dir), policies)
        with console.status("starting a server and uploading the samples"):
            with running_server(Path(data_dir), model, *flags) as (url, seconds):
                for key in keys.values():
                    with MPIC(url, key) as client:
                        health = client.health()
                        uploaded = upload_samples(client, folder, manifest["files"])
        console.print(demo_tables.what_runs(health, seconds), highlight=False)
        console.print(demo_tables.uploads(uploaded))
        with console.status("starting it again, and asking"):
            with running_server(Path(data_dir), model, *flags) as (url, seconds):
                console.print(f"started again in {seconds:.1f} s, so that all is on disk", highlight=False)
                asked = _ask_all(url, keys, questions, console)
    found = headline_of(asked)
    demo_tables.show(console, [q for q in questions if q["kind"] != EIGHT_IMAGES], asked, policies, found)
    if json_path is not None:
        body = {
            "model": health.model.model_dump(),
            "headline": found and asdict(found),
            "files": [f.model_dump() for f in uploaded],
            "questions": questions,
        }
        body["right"] = {p: sum(a.right for a in asked if a.policy == p) for p in policies}
        body["answers"] = [asdict(a) for a in asked]
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return _verdict(console, asked)


def _ask_all(
    url: str, keys: Mapping[str, str], questions: Sequence[dict[str, Any]], console: Console
) -> list[DemoAnswer]:
    """Ask the common questions twice, policy by policy, then those over eight images in turn."""
    asked: list[DemoAnswer] = []
    common = [q for q in questions if q["kind"] != EIGHT_IMAGES]
    for policy, key in keys.items():
        began = time.monotonic()
        with MPIC(url, key) as client:
            for turn in PASSES:
                asked += [ask(client, question, policy, turn) for question in common]
        took = time.monotonic() - began
        console.print(f"{policy}: everything asked twice in {took:.1f} s", highlight=False)
    with ExitStack() as stack:
        clients = {policy: stack.enter_context(MPIC(url, key)) for policy, key in keys.items()}
        for number, question in enumerate(q for q in questions if q["kind"] == EIGHT_IMAGES):
            answers = [ask(client, question, policy, WARM) for policy, client in clients.items()]
            asked += answers if number else []  # the first question warms everything up
    return asked


def make_users(data_dir: Path, policies: Sequence[str]) -> dict[str, str]:
    """Make a user for each policy, because caches are never shared by users; return their API keys by policy."""
    with closing(KeyStore(data_dir)) as store:
        return {policy: store.create(f"user-{number}")[0] for number, policy in enumerate(policies)}


def upload_samples(client: MPIC, folder: Path, entries: list[dict[str, Any]]) -> list[File]:
    """Upload the manifest's files and wait until each is compiled."""
    made = [client.files.create(folder / entry["path"], entry["handle"]) for entry in entries]
    return [client.files.wait(file.id) for file in made]


def ask(client: MPIC, question: dict[str, Any], policy: str, turn: str) -> DemoAnswer:
    """Ask one question under one policy."""
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
    """Return whether two answers are equal except for case, surrounding space and a full stop."""
    return answer.strip().rstrip(".").casefold() == expected.strip().rstrip(".").casefold()


@contextmanager
def running_server(data_dir: Path, model: str | None = None, *flags: str) -> Iterator[tuple[str, float]]:
    """Run ``mpic serve`` with a small pool; yield its URL and the seconds it took to start. Raise StartFailed, see
    ``server_process``."""
    options = ["--log-level", "warning", "--pool-bytes", str(POOL_BYTES)]
    options += [*(["--model", model] if model else []), *flags]
    started = time.monotonic()
    with server_process(data_dir, *options) as server:
        yield server.url, time.monotonic() - started


@contextmanager
def server_process(data_dir: Path, *flags: str) -> Iterator[ServerProcess]:
    """Run ``mpic serve`` as a process of its own on a free port, and end it.

    Args:
        data_dir: an existing folder.
        flags: options of ``mpic serve``.

    Yields:
        The server, as soon as it has announced its address.

    Raises:
        StartFailed: it ended or printed nothing; the message holds the end of its log.
    """
    serve = ["-m", "mpic.cli", "serve", "--port", "0", "--json", "--data-dir", str(data_dir)]
    command = [sys.executable, "-P", *serve, *flags]  # -P: import no modules from the working folder
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
        yield ServerProcess(process.pid, json.loads(line)["url"], log_path)
    finally:
        too_late.cancel()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _verdict(console: Console, asked: list[DemoAnswer]) -> int:
    must = [a for a in asked if a.policy == MUST_BE_RIGHT]
    missed = sorted({a.question for a in must if not a.right})
    if missed:
        console.print(f"[red]{MUST_BE_RIGHT} missed: {', '.join(missed)}[/]")
        return 1
    if must:
        console.print(f"[green]{MUST_BE_RIGHT} gave every expected answer.[/]")
    return 0
