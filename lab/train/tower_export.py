"""Writes a trained tower as a graft: a folder without the language model, which `mpic.model.graft` joins to it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, LlavaConfig, LlavaProcessor, SiglipImageProcessorPil

from mpic.data.published import GRAFT
from mpic.model.gguf_model import folder_of
from mpic.model.graft import TOWER
from mpic_lab.generator.scenes import PATCH, SIDE
from mpic_lab.train.tower_model import vision_config
from mpic_lab.train.tower_prompts import TOKENS
from mpic_lab.train.tower_run import Settings, checkpoint

TEMPLATE = Path(__file__).with_name("tower_template.jinja")
IMAGE = "<image>"
SPARE = "<gh_stars>"
"""A token of SmolLM's vocabulary for the source code of its pre-training, which no conversation has."""


def export(run: Path, to: Path, language: str, stage: str = "answers") -> None:
    """Write the folder of a graft from the checkpoint of a stage, as far as that has come.

    Args:
        run: the folder of ``mpic train tower``.
        to: folder to write.
        language: the language model as ``--model`` would name it.
        stage: join or answers.

    Raises:
        TowerRefused: there is no such checkpoint.
    """
    facts, weights = checkpoint(run, stage)
    to.mkdir(parents=True, exist_ok=True)
    folder = folder_of(language)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.get_vocab()
    image = ids[IMAGE if IMAGE in ids else SPARE]
    settings = Settings(run, folder, **facts["tower"])
    LlavaConfig(
        vision_config=vision_config(settings.width, settings.layers, settings.heads).to_dict(),
        text_config=AutoConfig.from_pretrained(folder).to_dict(),
        image_token_index=image,
        image_seq_length=TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
        architectures=["LlavaForConditionalGeneration"],
    ).save_pretrained(to)
    pixels = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_convert_rgb=True)
    processor = LlavaProcessor(
        image_processor=pixels,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        image_token=IMAGE,
        num_additional_image_tokens=0,
        chat_template=TEMPLATE.read_text().rstrip("\n"),
    )
    with tempfile.TemporaryDirectory() as whole:  # with the tokenizer, which the language model brings
        processor.save_pretrained(whole)
        for name in ("processor_config.json", "chat_template.jinja"):
            (to / name).write_bytes((Path(whole) / name).read_bytes())
    published = {"vision.": "vision_tower.vision_model.", "projector.": "multi_modal_projector."}
    tensors = {
        new + name.removeprefix(old): tensor.to(torch.bfloat16)
        for old, new in published.items()
        for name, tensor in weights.items()
        if name.startswith(old)
    }
    save_file(tensors, to / TOWER, metadata={"format": "pt"})
    about = {"language_model": language, "stage": stage, "step": facts["step"], "seed": settings.seed}
    (to / GRAFT).write_text(json.dumps(about, indent=2) + "\n")
