"""`mpic train mllm | clip`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Train the demo models on generated data.")

Out = Annotated[Path, typer.Option(help="folder for checkpoints, curves and the finished model")]
Resume = Annotated[bool, typer.Option("--resume", help="continue from the checkpoint in --out")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Seed = Annotated[int, typer.Option(help="seed of weights and data")]


@app.command()
def mllm(
    out: Out = Path("mllm-run"),
    minutes: Annotated[float, typer.Option(help="wall-clock budget of all stages")] = 80.0,
    steps: Annotated[int | None, typer.Option(help="steps of all stages, instead of minutes")] = None,
    workers: Annotated[int, typer.Option(help="processes; 0: one a core, or one on a GPU")] = 0,
    tokens: Annotated[int, typer.Option(help="tokens a step and worker")] = 2048,
    init: Annotated[str, typer.Option(help="structured or plain initial weights")] = "structured",
    device: Device = "auto",
    seed: Seed = 0,
    resume: Resume = False,
) -> None:
    """Train the multimodal model: OUT/plain (causal attention only) and OUT/pic (with the PIC-aware phase)."""
    from mpic.train.mllm import Settings, train_mllm

    if init not in ("structured", "plain"):
        raise typer.BadParameter("structured or plain", param_hint="--init")
    train_mllm(Settings(out, minutes, steps, device, workers, tokens, init, seed, resume))
    typer.echo(f"{out / 'pic'} and {out / 'plain'} are ready; curves in {out / 'curves.png'}")


@app.command()
def clip(
    out: Out = Path("clip-run"),
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 2400,
    device: Device = "auto",
    seed: Seed = 0,
    resume: Resume = False,
) -> None:
    """Train the image and text embedder of the retriever."""
    from mpic.train.clip import Settings, train_clip

    train_clip(Settings(out=out, steps=steps, device=device, seed=seed, resume=resume))
    typer.echo(f"{out} is ready")


@app.command()
def score(
    folder: Annotated[Path, typer.Argument(help="a model that `mpic train mllm` wrote")],
    size: Annotated[int, typer.Option(help="questions a cell")] = 200,
    reuse_size: Annotated[int | None, typer.Option(help="questions a cell where chunks are reused")] = None,
    minutes: Annotated[float | None, typer.Option(help="stop between cells after this long")] = None,
) -> None:
    """Held-out exact match under full attention and under reuse: FOLDER/scores.json and scores.md."""
    from mpic.train.evaluate import evaluate, write_report

    write_report(evaluate(folder, size, reuse_size=reuse_size, minutes=minutes), folder)
    typer.echo((folder / "scores.md").read_text())
