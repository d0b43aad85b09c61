"""`mpic train mllm | clip | packet | score | card`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Train the demo models on generated data, and adapters of any model.",
)

Out = Annotated[Path, typer.Option(help="folder for checkpoints, curves and the finished model")]
Resume = Annotated[bool, typer.Option("--resume", help="continue from the checkpoint in --out")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto takes a GPU if there is one")]
Seed = Annotated[int, typer.Option(help="seed of weights and data")]


@app.command()
def mllm(
    out: Out = Path("mllm-run"),
    minutes: Annotated[float, typer.Option(help="wall-clock budget of all stages")] = 80.0,
    steps: Annotated[int | None, typer.Option(help="steps of all stages, instead of minutes")] = None,
    workers: Annotated[int, typer.Option(help="processes; 0: one a core, at most four, or one on a GPU")] = 0,
    tokens: Annotated[int, typer.Option(help="tokens a step and worker")] = 2048,
    init: Annotated[str, typer.Option(help="structured or plain initial weights")] = "structured",
    start: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="go on from this finished `plain` model; give another --seed"
        ),
    ] = None,
    tower: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="begin with the vision tower of this finished model"),
    ] = None,
    generation: Annotated[
        int, typer.Option(min=1, max=2, help="2: 576 tokens an image, 8,192 of context, attention sinks")
    ] = 1,
    device: Device = "auto",
    seed: Seed = 0,
    resume: Resume = False,
) -> None:
    """Train the multimodal model: OUT/plain (causal attention only) and OUT/pic (with the PIC-aware phase)."""
    from mpic_lab.train.mllm import Settings, train_mllm

    if init not in ("structured", "plain"):
        raise typer.BadParameter("structured or plain", param_hint="--init")
    if tower and start:
        raise typer.BadParameter("a run that goes on from --start keeps its own tower", param_hint="--tower")
    train_mllm(
        Settings(out, minutes, steps, device, workers, tokens, init, tower, start, seed, generation, resume)
    )
    typer.echo(f"{out / 'pic'} and {out / 'plain'} are ready; curves in {out / 'curves.png'}")


@app.command()
def clip(
    out: Out = Path("clip-run"),
    steps: Annotated[
        int, typer.Option(min=1, help="batches; the learning rate falls to zero over them")
    ] = 1300,
    images: Annotated[int, typer.Option(min=2, help="pictures with a query each in a batch")] = 96,
    texts: Annotated[int, typer.Option(min=2, help="text-text pairs in a batch")] = 40,
    muon_lr: Annotated[
        float, typer.Option(help="learning rate of the matrices inside the transformers")
    ] = 0.02,
    adam_lr: Annotated[float, typer.Option(help="learning rate of everything else")] = 2e-3,
    precision: Annotated[str, typer.Option(help="fp32, or bf16 (automatic mixed precision)")] = "fp32",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: as many as torch likes")] = 0,
    start: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="go on from this finished model; give another --seed"
        ),
    ] = None,
    generation: Annotated[
        list[int] | None, typer.Option(min=1, max=2, help="of the pictures; default: both, in equal parts")
    ] = None,
    device: Device = "auto",
    seed: Seed = 0,
    resume: Resume = False,
) -> None:
    """Train the image and text embedder of the retriever: a small open_clip model.

    About ten minutes of one core. OUT becomes a folder that open_clip loads as `local-dir:OUT`, with the training
    curves and scores.json: recall@1 over held-out items and over the bundled reference sets. An interrupted run resumes
    with `--resume` from its last evaluation.
    """
    from mpic_lab.train import clip_scores
    from mpic_lab.train.clip import Settings, train_clip

    if precision not in ("fp32", "bf16"):
        raise typer.BadParameter("fp32 or bf16", param_hint="--precision")
    chosen = {"images": images, "texts": texts, "precision": precision, "threads": threads, "start": start}
    chosen["generations"] = tuple(sorted(set(generation or (1, 2))))
    rates = {"muon_lr": muon_lr, "adam_lr": adam_lr}
    train_clip(Settings(out=out, steps=steps, device=device, seed=seed, resume=resume, **rates, **chosen))
    for name, value in clip_scores.write(out)["held out: recall@1 over 200 items, five draws"].items():
        typer.echo(f"{name:32s} recall@1 {100 * value['mean']:5.1f} %")
    typer.echo(f"{out} is ready: open_clip.create_model_and_transforms('local-dir:{out}')")


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
def score(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="a model that `mpic train mllm` wrote")
    ],
    size: Annotated[int, typer.Option(min=1, help="questions a cell")] = 200,
    minutes: Annotated[float | None, typer.Option(help="begin no cell after this long")] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="processes; 0: one a core, at most four, or one on a GPU")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="keep the cells that an interrupted run finished")
    ] = False,
    wordings: Annotated[
        Literal["eval", "fresh", "free", "train"],
        typer.Option(help="list of wordings to ask in; other lists than `eval` are scored in scores-LIST.*"),
    ] = "eval",
) -> None:
    """Held-out exact match under full attention and under reuse: FOLDER/scores.json and scores.md.

    Questions over the same images and documents are answered together, up to eight; the tables say how many
    conversations the questions of a cell come from. Sprites, names and handles are held out in any case. The wordings
    are too, unless `--wordings train`: what they cost is the difference.
    """
    from mpic_lab.train.evaluate import evaluate, markdown, write_report

    result = evaluate(folder, size, minutes=minutes, workers=workers, resume=resume, asking=wordings)
    write_report(result, folder)
    typer.echo(markdown(result))


@app.command()
def card(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="a model that `mpic train score` has scored")
    ],
    run: Annotated[Path, typer.Option(exists=True, file_okay=False, help="--out of the run that trained it")],
    command: Annotated[str, typer.Option(help="the command that trained it")],
    machine: Annotated[str, typer.Option(help="what it was trained on")],
    notes: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="Markdown for the section `What to know`")
    ],
    plain: Annotated[bool, typer.Option("--plain", help="it had no PIC-aware phase")] = False,
    continued: Annotated[str, typer.Option(help="what the run went on from, if --start was given")] = "",
) -> None:
    """Write a model's card, FOLDER/README.md, from its scores and the log of its run."""
    from mpic_lab.train.card import write_card

    write_card(folder, run, not plain, machine, command, notes.read_text().strip(), continued)
    typer.echo(f"{folder / 'README.md'} is written")
