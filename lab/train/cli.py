"""`mpic train packet` and `mpic train tower`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Train adapters of any model, and a vision tower for a text model.",
)

GONE = (
    "the bundled models are trained no more; the trainers that made them are in the history of the repository "
    "(docs/demo-model.md)"
)


Seed = Annotated[int, typer.Option(help="seed of weights and data")]


@app.command()
def packet(
    model: Annotated[str | None, typer.Option(help="folder or hub id; default: the demo model")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help='JSONL, a line {"messages": ...} or {"documents": [...], "question": ...}'),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder of adapter and curve; default: packet/ in the model's folder")
    ] = None,
    samples: Annotated[int, typer.Option(min=16, help="prompts; an eighth as many more are held out")] = 256,
    epochs: Annotated[int, typer.Option(min=0, help="times every prompt is seen; 0: untrained")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="prompts a step")] = 16,
    tokens: Annotated[int, typer.Option(min=0, help="of the header, and of the trailer")] = 8,
    lr: Annotated[
        float, typer.Option(min=0, help="first learning rate, in deviations of the embedding table")
    ] = 0.015,
    objective: Annotated[
        Literal["kl", "ce"], typer.Option(help="kl to the model's own distribution, or ce of its own answer")
    ] = "kl",
    minutes: Annotated[
        float, typer.Option(min=0, help="cut the training to fit, without the answers before it; 0: no limit")
    ] = 0.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="of the model: auto (on a CPU float32), float32, bfloat16 or float16")
    ] = "auto",
    seed: Seed = 0,
    tasks: Annotated[
        str, typer.Option(help="only these tasks of the demo models' world, comma-separated; without --data")
    ] = "",
    resume: Annotated[bool, typer.Option("--resume", help="go on from the last epoch in --out")] = False,
) -> None:
    """Train the adapter that the policies packet and packet-K compile chunks in (KV Packet).

    The model stays as it is and teaches itself: its own answers under full attention are what its answers over packets
    shall be, so prompts need no labels. Without --data they are drawn from the demo models' world. A server whose model
    has packet/adapter.safetensors beside it offers both policies.
    """
    from mpic.config import ConfigError, bundled_model
    from mpic.model.dtype_choice import dtype_for_results
    from mpic.model.load import choose_device, load_model
    from mpic_lab.train.packet import PacketTrainer, Settings
    from mpic_lab.train.packet_data import chosen_tasks

    folder = model or bundled_model()
    if out is None and not Path(folder).is_dir():
        raise ConfigError("a model from the hub has no folder to write beside: give --out", param="out")
    settings = Settings(
        out or Path(folder) / "packet",
        data,
        samples,
        epochs,
        batch,
        tokens,
        lr,
        objective,
        48,
        minutes,
        seed,
        chosen_tasks(tasks, data),
    )
    loaded = load_model(folder, device=device, dtype=dtype_for_results(dtype, choose_device(device)))
    adapter = PacketTrainer(loaded, settings, resume, typer.echo).run()
    typer.echo(f"{settings.out / 'adapter.safetensors'} is ready: {adapter.digest[:12]}")


@app.command()
def tower(
    out: Annotated[
        Path, typer.Option(help="folder of checkpoints and log; a run goes on from what is there")
    ],
    language_model: Annotated[
        str, typer.Option(help="folder, GGUF file or name of a text model; it stays as it is")
    ] = "smollm2",
    minutes: Annotated[float, typer.Option(min=0, help="stop after so long; 0: run to the end")] = 0.0,
    stage: Annotated[
        Literal["all", "words", "sight", "join", "answers"], typer.Option(help="the one to run")
    ] = "all",
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="of the last stage; with more of them a run that is done goes on"),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="of torch")] = 1,
    seed: Seed = 0,
) -> None:
    """Train a vision tower that gives a language model eyes; every weight of that model stays as it is.

    The pictures are drawn shapes with questions in ordinary English, so photographs are beyond it. Stop it and start it
    again as you like: it goes on from its last checkpoint.
    """
    import torch

    from mpic.model.gguf_model import folder_of
    from mpic_lab.train.tower import TowerTrainer
    from mpic_lab.train.tower_run import STEPS, Settings

    torch.set_num_threads(threads)
    stages = tuple(STEPS) if stage == "all" else (stage,)
    numbers = STEPS | ({"answers": steps} if steps else {})
    settings = Settings(out, folder_of(language_model), minutes, stages, numbers, seed=seed)
    TowerTrainer(settings, typer.echo).run()


@app.command()
def tower_export(
    run: Annotated[Path, typer.Argument(help="folder of `mpic train tower`")],
    to: Annotated[Path, typer.Argument(help="folder to write, for `mpic serve --model`")],
    language_model: Annotated[str, typer.Option(help="as in the training")] = "smollm2",
    stage: Annotated[Literal["join", "answers"], typer.Option(help="whose checkpoint")] = "answers",
) -> None:
    """Write the folder of a model from a trained tower. The language model's weights are not copied into it."""
    from mpic_lab.train.tower_export import export

    export(run, to, language_model, stage)


def _refuse(former: str) -> None:
    @app.command(
        former, hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
    )
    def refused() -> None:
        raise typer.BadParameter(f"there is no `mpic train {former}` any more: {GONE}")


for _former in ("mllm", "clip", "score", "card"):
    _refuse(_former)
