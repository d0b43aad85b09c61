"""A bench model as a folder, as a hub repository is: for servers and for vLLM, which load models by path.

Its tokenizer has one word a token: word i is ``w`` and i, so a text of n such words has n tokens.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mpic.evals.bench.drive import IMAGE_TOKEN, Decoder, Tower
from mpic.train.model import published_name

CONTROL = ("<pad>", "<s>", "</s>", "<unk>", "<|im_end|>", "<image>", "<|im_start|>", "user", "assistant", ":")
"""The first words of the vocabulary; random ids begin behind them."""
assert CONTROL[IMAGE_TOKEN] == "<image>"

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} : "
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|> "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant : {% endif %}"
)


def save(model: LlavaForConditionalGeneration, decoder: Decoder, tower: Tower, folder: Path) -> None:
    """Write a model of ``drive.random_model`` with its processor, under the names that transformers and vLLM load."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = next(model.parameters()).dtype
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    state = {
        published_name(name): value.to("cpu", copy=True).contiguous()
        for name, value in model.state_dict().items()
        if not (decoder.config().tie_word_embeddings and name.startswith("lm_head."))
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": tower.size},
            crop_size={"height": tower.size, "width": tower.size},
            do_convert_rgb=True,
        ),
        tokenizer=tokenizer(decoder.vocabulary),
        patch_size=tower.patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One token a word; a word that is none of the vocabulary's is ``<unk>``."""
    words = [*CONTROL, *(f"w{i}" for i in range(len(CONTROL), vocabulary))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=["<image>", "<|im_start|>", "<|im_end|>"],
        chat_template=_TEMPLATE,
    )


def words(ids: tuple[int, ...]) -> str:
    """The text whose tokens are ``ids``, none of them a control token."""
    return " ".join(f"w{i}" for i in ids)
