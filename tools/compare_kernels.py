"""Times the attention kernels of a CPU in this tree against those of another one: did a change make them slower?

    git worktree add --detach ../before COMMIT
    python tools/compare_kernels.py ../before --json kernels.json

Each tree has a process of its own, and the two take turns, one measurement each, so that a machine whose speed drifts
slows both. Threads of the one that has finished do not spin while the other measures. Every case is a layer of a plain
model: no windows, no capped scores, no sinks. The calls that it makes (``attend``, ``Singles.of``, ``stream.load``) are
older than those features.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

FOLDERS = ("kernels", "data", "webui", "retriever")
"""The folders beside ``mpic`` that are parts of the package."""
LIMIT = 1.02
"""A case is marked where three quarters of its ratios are above this one."""


def cases() -> dict[str, Callable[[], object]]:
    """Return the measurements of this process's tree: each computes one layer once.

    Shapes: 12 heads of 64 dimensions, and 12 query heads over 4 KV heads where it says *grouped*.
    """
    import torch

    from mpic.kernels import cpu, stream
    from mpic.kernels.attention import KVView, QueryRotation, SpanCall, attend
    from mpic.kernels.singles import Singles
    from mpic.kernels.span import Span

    torch.manual_seed(0)
    heads, dim = 12, 64
    angle = torch.rand(1, dim // 2)
    made: dict[str, Callable[[], object]] = {}

    def rotation(base: int) -> QueryRotation | None:
        return QueryRotation(angle[0].cos(), angle[0].sin()) if base else None

    def rotations(bases: list[int]) -> QueryRotation | None:
        every = angle.expand(len(bases), -1)
        return QueryRotation(every.cos(), every.sin()) if any(bases) else None

    def view(slots: int, kv_heads: int, dtype: torch.dtype) -> KVView:
        return KVView(torch.randn(1, 2, kv_heads, slots, dim).to(dtype))

    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        for kv_heads, group in ((12, ""), (4, " grouped")):
            views = [view(576, kv_heads, dtype) for _ in range(8)]
            owns = [view(4096, kv_heads, dtype) for _ in range(8)]

            def single(rows: int, shared: bool, names: str, kernel: str, v=views, o=owns, dt=dtype) -> None:
                calls = []
                for row in range(rows):
                    at = slice(row, row + 1)
                    calls.append(SpanCall(at, Span(o[row], 0, 256 if shared else 4096), first=True))
                    if shared:
                        calls += [SpanCall(at, Span(w, 0, 576, 576 * i + 1)) for i, w in enumerate(v)]
                q = torch.randn(heads, rows, dim).to(dt)
                if kernel == "stream":
                    step = stream.load(dim, dt).rows(calls, heads, rotations)
                else:
                    step = Singles.of(calls, cpu.partial, rotations)
                made[names] = lambda: step.attend(q, 0, dim**-0.5)

            single(1, False, f"stream, 1 row, 4k of its own, {name}{group}", "stream")
            single(8, True, f"stream, 8 rows, 8 chunks shared, {name}{group}", "stream")
            single(8, True, f"torch, 8 rows, 8 chunks shared, {name}{group}", "torch")

            def link(rows: int, chunks: int, names: str, v=views, o=owns, dt=dtype) -> None:
                every, own = slice(0, rows), Span(o[0], 0, rows)
                calls = [SpanCall(every, own, causal=True, first=True)]
                calls += [SpanCall(every, Span(w, 32, 576, 576 * i + 1)) for i, w in enumerate(v[:chunks])]
                q = torch.randn(heads, rows, dim).to(dt)
                made[names] = lambda: attend(q, calls, dim**-0.5, cpu.partial, rotation)

            link(320, 8, f"blocks, 320 rows over 8 chunks, {name}{group}")
            link(2048, 0, f"blocks, 2,048 rows of their own, {name}{group}")
    return made


def child() -> None:
    """Answer ``CASE COUNT`` lines on standard input with the seconds that one call took, the mean of COUNT."""
    known = cases()
    print(json.dumps(list(known)), flush=True)
    for line in sys.stdin:
        case, count = json.loads(line)
        begin = time.perf_counter()
        for _ in range(count):
            known[case]()
        print((time.perf_counter() - begin) / count, flush=True)


class Tree:
    """A process that measures the kernels of a checked-out tree."""

    def __init__(self, root: Path, links: Path, threads: str) -> None:
        package = links / "mpic"
        package.mkdir(parents=True)
        for part in [*(root / "mpic").iterdir(), *(root / folder for folder in FOLDERS)]:
            if not (package / part.name).exists():
                (package / part.name).symlink_to(part.resolve())
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"PYTHONPATH": str(links), "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": threads},
        )
        self.cases: list[str] = json.loads(self._answer())

    def _answer(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise SystemExit("A tree's process ended; its error is above.")
        return line

    def seconds(self, case: str, count: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([case, count]) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(before: Tree, now: Tree, cases: list[str], rounds: int) -> list[dict[str, object]]:
    """Return a row per case: microseconds of both, and the median of the ratios of neighbouring measurements."""
    rows: list[dict[str, object]] = []
    for case in cases:
        count = max(1, int(0.02 / max(before.seconds(case, 2), now.seconds(case, 2))))
        pairs = []
        for number in range(rounds):  # who is first changes
            order = (before, now) if number % 2 else (now, before)
            took = {tree: tree.seconds(case, count) for tree in order}
            pairs.append((took[before], took[now]))
        ratios = sorted(b / a for a, b in pairs)
        quarter = len(ratios) // 4
        row = {
            "case": case,
            "before_us": round(statistics.median(a for a, _ in pairs) * 1e6, 1),
            "now_us": round(statistics.median(b for _, b in pairs) * 1e6, 1),
            "ratio": round(statistics.median(ratios), 3),
            "quartiles": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)],
        }
        rows.append(row)
        mark = "  SLOWER" if ratios[quarter] > LIMIT else ""
        print(
            "{case:55} {before_us:>10} {now_us:>10} {ratio:>6} {quartiles}".format(**row) + mark, flush=True
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, nargs="?", help="the other tree")
    parser.add_argument("--cases", default="", help="only those with this text in their names")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--threads", default="1", help="of each tree's kernels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child()
    if options.before is None:
        parser.error("the other tree is missing")
    with tempfile.TemporaryDirectory() as folder:
        before = Tree(options.before.resolve(), Path(folder) / "before", options.threads)
        now = Tree(Path(__file__).resolve().parent.parent, Path(folder) / "now", options.threads)
        print(f"{'case':55} {'before us':>10} {'now us':>10} {'ratio':>6} quartiles", flush=True)
        cases = [case for case in now.cases if options.cases in case]
        if not cases:
            raise SystemExit(f"No case has {options.cases!r} in its name: {', '.join(now.cases)}")
        rows = compare(before, now, cases, options.rounds)
        before.close()
        now.close()
    ratio = statistics.geometric_mean([float(str(row["ratio"])) for row in rows])
    print(f"all cases together: {ratio:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "ratio": round(ratio, 4)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
