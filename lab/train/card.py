"""The model card of a demo checkpoint, from its scores and its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from mpic_lab.train.generations import GENERATIONS, generation_at

_TEXT = """---
license: apache-2.0
pipeline_tag: image-text-to-text
library_name: transformers
---
# {title}

{what}

A plain `LlavaForConditionalGeneration` (CLIP vision tower of {vision_layers} layers, Llama of {layers} layers, {heads}
heads of {head_dim}, RoPE; {parameters:.1f} M parameters, bf16): {side} x {side} px images are {image_tokens} tokens,
{context:,} tokens of context. It loads unchanged in transformers, and its weight names are those vLLM's LLaVA reads.
Its world is generated (`mpic_lab.generator`): coloured shapes and digits, cards, biographies, codes. It knows nothing
else, and it is made to be measured, not to be useful.

## Prompt

{prompt}

## Recipe

`{command}`

{seconds} of training on {machine}, {steps} steps, about {tokens:.0f} M tokens.{continued}

1. **Vision** ({vision_time}): {vision}
2. **Base** ({base_minutes:.0f} min): answers under ordinary causal attention, loss on what the model generates only,
   up to 20 questions a conversation{curriculum}.
{pic}
{initial}
Muon and AdamW, linear decay, fixed seeds; the vision tower is frozen after its stage. ![curves](curves.png)

## Scores

Held-out sprites, names, handles, wordings and seeds; exact match of the whole answer, %; n questions
from so many conversations (those of a conversation are about the same chunks, each asked alone).
`reuse` links chunks compiled alone, `mpic-k` recomputes the first k tokens of each chunk (LegoLink-k is the same here:
no chunk starts at position 0), `no shift` leaves the chunks' keys at the positions they were compiled at.

{summary}

{table}

## What to know

{notes}
"""


class CardTexts(NamedTuple):
    """The texts in which the cards of the two generations differ."""

    prompt: str
    vision: str
    initial: str


TEXTS = {
    1: CardTexts(
        prompt="""
`<s> USER: image one:<image> end of image one. document LUMA7:TEXT end of document LUMA7. QUESTION ASSISTANT:`

Chunks are named before and after, by number word or by handle. When the answer is not in the prompt the model generates
`<search> query</search>`; the caller appends ` reference one:CHUNK end of reference one.` and lets it go on.
The chat template spells all this.
""",
        vision="""
image tokens learn to be sums of word embeddings of what they show. The
   first 16 tokens are summaries (quadrants, count, digit), the others hold what their own quadrant shows.
""",
        initial="""
The initial weights of the language model are **structured**, not random: they hold rough hand-built attention heads
(previous token, most recent label, name or content word, matching and induction; see `lab/train/initial_weights.py`).
Random weights were not trained at this size; an earlier study with a tenth of the tokens got no further with them
than the form of an answer.
""",
    ),
    2: CardTexts(
        prompt="""
`<s> USER: image one:<image> document LUMA7:TEXT QUESTION ASSISTANT:`

Images and documents are named before them, by number word or by handle. When the answer is not in the prompt the model
generates `<search> query</search>`; the caller appends
` reference one:CHUNK end of reference one.` and lets it go on. The chat template spells all this.
""",
        vision="""
image tokens learn to be sums of the word embeddings of what their own patch
   shows, beside a random code of their place, the same for all images. No token summarises an image.
""",
        initial="""
The initial weights of the language model are **structured**, not random: they hold rough hand-built attention heads
(previous token, most recent label, name or content word, matching and induction), heads that find the image behind a
label and what has its background, and **attention sinks**: a circuit of layers 0 and 1 turns a token that sees only
itself into one with a massive activation, on which the heads of later layers may rest. Training leaves layer 0 and
these circuits as they are, and trains all the rest (`lab/train/sink_weights.py`, `lab/train/initial_weights.py`):
what a patch's words become in an answer, and how much attention a sink gets, is learnt.
""",
    ),
}


def _summary(figures: dict[str, Any]) -> str:
    lines = ["| | |", "|---|---|"]
    for name, value in figures.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k}: {v}" for k, v in value.items() if v is not None)
        elif isinstance(value, list):
            value = ", ".join(f"{100 * v:.1f} %" for v in value)
        lines.append(f"| {name} | {value} |")
    return "\n".join(lines)


def stage_seconds(log: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the seconds each stage trained for."""
    seconds: dict[str, float] = {}
    for entry in log:
        seconds[entry["stage"]] = max(seconds.get(entry["stage"], 0), entry["seconds"])
    return seconds


def write_card(
    folder: Path, run: Path, pic: bool, machine: str, command: str, notes: str, continued: str = ""
) -> None:
    """Writes `README.md` in the model's folder, from `scores.json` and `scores.md` there and `curves.json` of the
    run."""
    log = json.loads((run / "curves.json").read_text())
    seconds = stage_seconds(log)
    # a run of the second generation that goes on from a finished model does not train its tower
    stages = [*(["vision"] if "vision" in seconds else []), "base", *(["pic"] if pic else [])]
    steps = sum(max(e["step"] for e in log if e["stage"] == s) for s in stages)
    tokens = 0.0
    for stage in [stage for stage in stages if stage != "vision"]:
        rates = [e["tokens_per_s"] for e in log if e["stage"] == stage and e.get("tokens_per_s")]
        tokens += sorted(rates)[len(rates) // 2] * seconds[stage] / 1e6
    scores = json.loads((folder / "scores.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    language, vision = config["text_config"], config["vision_config"]
    generation = generation_at(folder)
    number = next(n for n, g in GENERATIONS.items() if g is generation)
    weights = (folder / "model.safetensors").stat().st_size
    phase = (
        f"3. **PIC-aware phase** ({seconds.get('pic', 0) / 60:.0f} min): in half of the batches chunk tokens beyond a "
        f"random head\n   ({min(generation.pic_heads)} to {max(generation.pic_heads)} tokens) see only their own "
        "chunk, as after a link. A head of 0 is left out, so that full reuse stays lossy.\n"
    )
    card = _TEXT.format(
        title="MPIC demo model" if pic else "MPIC demo model, plain",
        what="**Trained with a PIC-aware phase**."
        if pic
        else "The same recipe **without the PIC-aware phase**: ordinary causal attention only.",
        parameters=weights / 2e6,
        vision_layers=vision["num_hidden_layers"],
        layers=language["num_hidden_layers"],
        heads=language["num_attention_heads"],
        head_dim=language["head_dim"],
        side=vision["image_size"],
        image_tokens=config["image_seq_length"],
        context=language["max_position_embeddings"],
        **{name: text.strip() for name, text in TEXTS[number]._asdict().items()},
        command=command,
        seconds=f"{sum(seconds[s] for s in stages) / 60:.0f} min",
        machine=machine,
        steps=steps,
        tokens=tokens,
        continued=f" {continued}" if continued else "",
        vision_time=f"{seconds['vision'] / 60:.0f} min" if "vision" in seconds else "not in this run",
        base_minutes=seconds["base"] / 60,
        curriculum="" if continued else ", curriculum from 1-2 chunks to 10",
        pic=phase if pic else "",
        summary=_summary(scores["summary"]),
        table=(folder / "scores.md").read_text().strip(),
        notes=notes,
    )
    (folder / "README.md").write_text(card)
