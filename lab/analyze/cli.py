"""``mpic analyze``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from mpic.link import Policy
    from mpic.model.loaded import LoadedModel
    from mpic.prompt import ChatTemplate, Prompt
    from mpic_lab.analyze.dense import DenseLinker

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

POLICIES = "full,reuse,mpic-16,legolink-0"
_BEFORE = ("The first text.", "Another one, longer.")
"""The two texts before a chunk whose KV is compared."""


@app.command()
def analyze(
    model: Annotated[str | None, typer.Option(help="folder or hub id; left out: the demo model")] = None,
    task: Annotated[str, typer.Option(help="whose sample is looked at; `mpic eval tasks` lists them")] = (
        "world-image"
    ),
    path: Annotated[Path | None, typer.Option(help="the task's local file, if it reads one")] = None,
    images: Annotated[Path | None, typer.Option(help="the task's folder of images, if any")] = None,
    chunks: Annotated[int, typer.Option(min=1, help="images and documents in the prompt")] = 3,
    sample: Annotated[int, typer.Option(min=0, help="which sample of the task")] = 0,
    samples: Annotated[
        int,
        typer.Option(
            min=1, help="sum up so many samples instead, from that one on; 100 take minutes on a CPU"
        ),
    ] = 1,
    policies: Annotated[str, typer.Option(help="static policies, with commas")] = POLICIES,
    packet: Annotated[Path | None, typer.Option(help="adapter of packets; left out: the model's")] = None,
    layer: Annotated[int | None, typer.Option(help="of the attention maps; left out: the middle one")] = None,
    out: Annotated[Path, typer.Option(help="folder for figures and numbers")] = Path("analysis"),
) -> None:
    """Look at attention and KV of one prompt: does the question look at chunk heads, what do policies change?

    Write `attention-shares.png` (CDF of attention, and how much goes to the first tokens of a chunk),
    `kv-distance.png` (how much a chunk's KV depends on the text before it), `attention-maps.png` and
    `attention-error.png` (policies side by side), and `analysis.json`.

    With `--samples N` it draws what N prompts have in common, with the first output token's row: `attention-scores.png`
    (MPIC, figure 4), `important-tokens.png` (figure 8), `attention-groups.png` (figure 11; EPIC, figures 4 and 7) and
    `sinks.png` (the share of attention on first tokens, by layer); with a policy of packets among them also
    `packet-attention.png` (KV Packet, figure 5), where it is compared with `reuse`.
    """
    from mpic.config import bundled_model
    from mpic.link import parse_policy
    from mpic.model.dtype_choice import dtype_for_results
    from mpic.model.load import choose_device, load_model
    from mpic.packet.adapter import find_adapter
    from mpic.prompt import ChatTemplate
    from mpic_lab.analyze.dense import DenseLinker

    linkings = list(dict.fromkeys(parse_policy(name.strip()) for name in ["full", *policies.split(",")]))
    if samples == 1 and any(policy.wrapping.packet for policy in linkings):
        raise typer.BadParameter(
            "packets are drawn over many samples only: give --samples", param_hint="--policies"
        )
    loaded = load_model(model or bundled_model(), dtype=dtype_for_results("auto", choose_device()))
    template = ChatTemplate(loaded.processor)
    prompts = _prompts(loaded, template, task, path, images, chunks, range(sample, sample + samples))
    adapter = find_adapter(loaded, model or bundled_model(), str(packet or ""))
    linker = DenseLinker(loaded, adapter)
    shown = loaded.shape.layers // 2 if layer is None else layer
    if not 0 <= shown < loaded.shape.layers:
        raise typer.BadParameter(f"the model has layers 0 to {loaded.shape.layers - 1}", param_hint="--layer")
    if samples > 1:
        numbers, table, written = _many(linker, linkings, prompts, shown, out)
    else:
        before = tuple(tuple(template.tokenize_document(text)) for text in _BEFORE)
        numbers, table, written = _one(linker, linkings, next(prompts), before, shown, out)
    (out / "analysis.json").write_text(json.dumps({"task": task} | numbers, indent=2) + "\n")
    console = Console()
    console.print(table, markup=False)
    console.print("\n".join(str(one) for one in written), markup=False)


def _prompts(
    model: LoadedModel,
    template: ChatTemplate,
    task: str,
    path: Path | None,
    images: Path | None,
    chunks: int,
    samples: range,
) -> Iterator[Prompt]:
    """Return the prompts of some samples of a task. Raise TaskError if there are too few."""
    from mpic.data.bundled import generation_for
    from mpic.prompt import build_prompt
    from mpic_lab.eval.resolve import LocalResolver, counter_of, splitter_of
    from mpic_lab.eval.tasks import Options, TaskError, find

    options = Options(path=path, images=images, chunks=chunks, questions=samples.stop)
    options = replace(options, splitter=splitter_of(template), count=counter_of(template))
    options = replace(options, generation=generation_for(model.context_length))
    asked = list(itertools.islice(find(task).load(options), samples.start, samples.stop))
    if len(asked) < len(samples):
        raise TaskError(f"{task} has no sample {samples.start + len(asked)}")
    return (build_prompt(one.messages, template, LocalResolver(template)) for one in asked)


Analysis = tuple[dict[str, Any], Table, list[Path]]
"""The result of an analysis: its numbers, a table of some of them, and the figures that were written."""


def _one(
    linker: DenseLinker,
    policies: list[Policy],
    prompt: Prompt,
    before: tuple[tuple[int, ...], tuple[int, ...]],
    shown: int,
    out: Path,
) -> Analysis:
    """Draw one prompt under each policy; ``shown`` is the layer of the maps."""
    from mpic_lab.analyze import figures, measures

    linked = [linker.link(prompt, policy) for policy in policies]
    full = linked[0]
    distance = measures.distance(linker, prompt.chunks[-1], before)
    written = [
        figures.save(out / "attention-shares.png", figures.shares, full),
        figures.save(out / "kv-distance.png", figures.distances, distance),
        figures.save(out / "attention-maps.png", figures.maps, linked, shown, size=(4 * len(linked), 4)),
        figures.save(out / "attention-error.png", figures.errors, linked[1:], full),
    ]
    numbers = measures.numbers(linked, distance)
    return numbers, _table(numbers), written


def _many(
    linker: DenseLinker, policies: list[Policy], prompts: Iterable[Prompt], shown: int, out: Path
) -> Analysis:
    """Draw averages over many prompts."""
    from rich.progress import track

    from mpic.link import parse_policy
    from mpic_lab.analyze import figures, many_figures
    from mpic_lab.analyze.many import Gathered, spread
    from mpic_lab.analyze.packet_attention import PacketAttention

    plain, packets = ([p for p in policies if p.wrapping.packet is wrapped] for wrapped in (False, True))
    found: Gathered | None = None
    for prompt in track(prompts, "linking", console=Console(stderr=True)):
        if found is None:
            found = Gathered(linker, tuple(plain), len(prompt.chunks))
            compared = PacketAttention(linker, (parse_policy("reuse"), *packets), len(prompt.chunks))
        found.add(prompt)
        if packets:
            compared.add(prompt)
    assert found is not None
    wide = (3 + 3 * len(plain), 5)
    written = [
        figures.save(out / "attention-scores.png", many_figures.distribution, found),
        figures.save(out / "important-tokens.png", many_figures.important, found),
        figures.save(out / "attention-groups.png", many_figures.maps, found, shown, size=wide),
        figures.save(out / "sinks.png", many_figures.sinks, found),
    ]
    numbers = {"layer": shown} | found.numbers()
    if packets:
        tall = (10, 2 + 2 * len(compared.sums))
        written.append(figures.save(out / "packet-attention.png", compared.draw, size=tall))
        numbers["question_to_chunks"] = compared.numbers()
    heads = (f"{name}: chunks' first tokens" for name in found.sums)
    table = Table("layer", "full: first token", "a chunk alone: its first token", *heads)
    spreads = [found.spread("full", "first"), spread(found.alone)]
    spreads += [found.spread(name, "heads") for name in found.sums]
    for number in range(linker.model.shape.layers):
        shares = (f"{100 * mean[number]:.0f} ±{100 * deviation[number]:.0f} %" for mean, deviation in spreads)
        table.add_row(str(number), *shares)
    return numbers, table, written


def _table(numbers: dict[str, Any]) -> Table:
    moved = {name: numbers["attention_error"][name] for name in numbers["policies"][1:]}
    table = Table("layer", "first 4 tokens of a chunk", "first 16", *(f"{n}: attention moved" for n in moved))
    shares = numbers["share_of_first_tokens"]
    for layer, (four, sixteen) in enumerate(zip(shares["4"], shares["16"], strict=True)):
        errors = (f"{values[layer]:.3f}" for values in moved.values())
        table.add_row(str(layer), f"{100 * four:.0f} %", f"{100 * sixteen:.0f} %", *errors)
    return table
