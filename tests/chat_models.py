"""Tokenizers, processors and chat templates of well-known model families, tiny, built in a moment.

The templates imitate those of the families (trim, reorder, alternate, refuse, escape) in short form.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    CLIPImageProcessor,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from mpic.errors import FileNotFound, InvalidImage, UnknownHandle
from mpic.kv.chunk import Chunk, ChunkKey, digest

CORPUS = [
    "What is shown in this image? Compare the tower in the first picture with the second one.",
    "The quick brown fox jumps over the lazy dog. user assistant system USER: ASSISTANT: document image end of",
    "Answer the question with the documents above, in one sentence; say so if they do not tell.",
    "  def main():\n    return {'a': [1, 2, 3]}\n\nend of document 1.\n" * 3,
] * 4

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + "
    "m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
LLAMA31 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set sys = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set sys = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{% if tools %}{{ 'Environment: ipython\\n' }}"
    "{% for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}{% endif %}{{ sys + '<|eot_id|>' }}"
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}"
    "{{ m.content | tojson if m.content is iterable else m.content }}{{ '<|eot_id|>' }}"
    "{% elif m.tool_calls %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{% set call = m.tool_calls[0].function %}"
    '{{ \'{"name": "\' + call.name + \'", "parameters": \' }}{{ call.arguments | tojson }}'
    "{{ '}<|eot_id|>' }}{% else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set sys = messages[0].content + '\\n\\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set sys = '' %}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% if m.role == 'user' %}"
    "{{ ' [INST] ' + (sys if loop.last else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools' }}{% for t in tools %}{{ '\\n' }}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% set reasoning = '' %}"
    "{% if m.reasoning_content is string %}{% set reasoning = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.last and reasoning %}{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ content }}{% for c in m.tool_calls %}{{ '\\n<tool_call>\\n{\"name\": \"' + c.function.name + '\", ' }}"
    "{{ '\"arguments\": ' }}{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{{ '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>') | last %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + eos_token }}{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{{ '<start_of_turn>' + m.role | replace('assistant', 'model') + '\\n' }}"
    "{{ m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
LLAVA15 = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role.upper() + ': ' }}{% endif %}"
    "{% for c in m.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
LLAVA_NEXT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }}{% endfor %}{% endif %}"
    "{{ ' [/INST]' }}{% elif m.role == 'system' %}{{ '<<SYS>>\\n' + m.content + '\\n<</SYS>>\\n\\n' }}"
    "{% else %}{{ ' ' + (m.content if m.content is string else m.content[0].text) + '</s> ' }}{% endif %}"
    "{% endfor %}"
)
QWEN2_VL = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' or 'image' in c or 'image_url' in c %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LABELS = (  # prints documents and the names of images, and counts those that have none
    "{{ bos_token }}{% set n = namespace(image=0, document=0) %}{% for m in messages %}{{ ' ' + m.role.upper() + ':' }}"
    "{% for c in ([{'type': 'text', 'text': m.content}] if m.content is string else m.content) %}"
    "{% if c.type == 'text' %}{{ ' ' + c.text }}{% else %}{% if c.type == 'image' %}{% set n.image = n.image + 1 %}"
    "{% set label = 'image ' ~ (c.name or n.image) %}{% else %}{% set n.document = n.document + 1 %}"
    "{% set label = 'document ' ~ (c.name or n.document) %}{% endif %}"
    "{{ ' ' + label + ':' + (c.text if c.type == 'document' else '<image>') + ' end of ' + label + '.' }}"
    "{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)


def byte_level(
    *control: str, bos: str | None = None, eos: str = "</s>", **special: str
) -> PreTrainedTokenizerFast:
    """Byte-level BPE in the manner of Llama 3 and Qwen: BOS (if any) is added by the post-processor."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\d| ?[^\s\p{L}\d]+|\s+(?!\S)|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finish(tokenizer, control, bos, eos, special)


def metaspace(
    *control: str, legacy: bool = False, bos: str = "<s>", eos: str = "</s>"
) -> PreTrainedTokenizerFast:
    """SentencePiece-like BPE with byte fallback in the manner of Llama 2; ``legacy``: a space in front of every
    piece of text between control tokens, else only at the very start."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", bos, eos, *(f"<0x{i:02X}>" for i in range(256))]
    options = {"vocab_size": 700, "show_progress": False, "max_token_length": 8}
    trainer = trainers.BpeTrainer(special_tokens=special, **options)
    # the control strings in the corpus give merges that make them, as a converted tokenizer may have
    tokenizer.train_from_iterator([*CORPUS, *["<s> </s> <image> [INST] [/INST]"] * 9], trainer)
    state = json.loads(tokenizer.to_str())
    del state["added_tokens"][3:]  # bytes are in the vocabulary, but not to be matched in text
    tokenizer = Tokenizer.from_str(json.dumps(state))
    return _finish(tokenizer, control, bos, eos, {"unk_token": "<unk>"})


def unigram(*control: str) -> PreTrainedTokenizerFast:
    """Unigram whose vocabulary holds the control tokens as pieces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>", *control]
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finish(tokenizer, control, "<s>", "</s>", {"unk_token": "<unk>"})


def word_level(*control: str) -> PreTrainedTokenizerFast:
    """Words, one token each; the control tokens are words of the vocabulary."""
    words = ["<unk>", "<s>", "</s>", *control, *sorted({w for text in CORPUS for w in text.split()})]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _finish(tokenizer, control, "<s>", "</s>", {"unk_token": "<unk>"})


def _finish(tokenizer: Tokenizer, control: tuple[str, ...], bos: str | None, eos: str, special: dict) -> Any:
    """Add the control tokens; odd ones out are ``<think>``-like (added, not special) and ``<|end|>`` (strips)."""
    strips = {"<|end|>", "<|user|>", "<|assistant|>"}
    names = [name for name in (bos, eos) if name]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])  # ordinary text
    for name in control:
        kind = not name.strip("</>").startswith(("think", "tool"))
        token = AddedToken(name, special=kind, normalized=False, rstrip=name in strips)
        (tokenizer.add_special_tokens if kind else tokenizer.add_tokens)([token])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, **special)


def _with_template(tokenizer: Any, template: str) -> Any:
    tokenizer.chat_template = template
    return tokenizer


def _llava(cls: type, tokenizer: Any, template: str) -> Any:
    options = {"patch_size": 14, "vision_feature_select_strategy": "default"}
    images = LlavaNextImageProcessor() if cls is LlavaNextProcessor else CLIPImageProcessor()
    return cls(images, tokenizer, chat_template=template, **options)


def _qwen2_vl() -> Any:
    im = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = byte_level(*im, eos="<|im_end|>")
    return Qwen2VLProcessor(
        Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=QWEN2_VL
    )


HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHATML_TOKENS = ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
BUILD = {
    "llama3": lambda: _with_template(byte_level(*HEADERS, bos="<|begin|>"), LLAMA3),
    "llama3.1": lambda: _with_template(byte_level(*HEADERS, bos="<|begin|>"), LLAMA31),
    "mistral": lambda: _with_template(metaspace("[INST]", "[/INST]"), MISTRAL),
    "mistral-legacy": lambda: _with_template(metaspace(legacy=True), MISTRAL),
    "qwen2": lambda: _with_template(byte_level(*CHATML_TOKENS[:1], eos="<|im_end|>"), CHATML),
    "qwen3": lambda: _with_template(byte_level(*CHATML_TOKENS, eos="<|im_end|>"), QWEN3),
    "r1": lambda: _with_template(
        byte_level("<｜User｜>", "<｜Assistant｜>", *CHATML_TOKENS[1:3], bos="<s>"), R1
    ),
    "phi3": lambda: _with_template(
        metaspace("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", legacy=True), PHI3
    ),
    "no-system": lambda: _with_template(unigram("<start_of_turn>", "<end_of_turn>"), NO_SYSTEM),
    "plain": lambda: metaspace(),
    "llava-1.5": lambda: _llava(LlavaProcessor, metaspace("<image>", legacy=True), LLAVA15),
    "llava-next": lambda: _llava(LlavaNextProcessor, metaspace("<image>"), LLAVA_NEXT),
    "llava-plain": lambda: _llava(LlavaProcessor, metaspace("<image>"), None),
    "qwen2-vl": _qwen2_vl,
    "labels": lambda: _llava(LlavaProcessor, byte_level("<image>", bos="<s>"), LABELS),
    "labels-words": lambda: _llava(LlavaProcessor, word_level("<image>"), LABELS),
}
VISION = ("llava-1.5", "llava-next", "llava-plain", "qwen2-vl", "labels", "labels-words")
TEXT = tuple(family for family in BUILD if family not in VISION)


@cache
def processor(family: str) -> Any:
    """The processor (or, of a text model, the tokenizer) of a family."""
    return BUILD[family]()


class DictResolver:
    """Chunks by handle, file id and cache id, in dictionaries; inline content becomes chunks without a library."""

    def __init__(
        self, tokenize: Any, images: tuple[str, ...] = (), files: dict[str, str] | None = None
    ) -> None:
        self.tokenize = tokenize
        self.images = {name: image_chunk(name) for name in images}
        self.files = {name: self.inline_text(text, name) for name, text in (files or {}).items()}
        self.asked: list[tuple[str, str]] = []

    def by_handle(self, kind: str, name: str) -> Chunk:
        self.asked.append((kind, name))
        found = self.images.get(name) or (self.files.get(name) if kind == "file" else None)
        if not found:
            raise UnknownHandle(f"{kind.upper()}#{name} is not in your library")
        return found

    def by_file_id(self, file_id: str) -> Chunk:
        found = {**self.images, **self.files}.get(file_id.removeprefix("file-"))
        if not found:
            raise FileNotFound(f"no file {file_id}")
        return found

    def by_cache_id(self, cache_id: str) -> list[Chunk]:
        if cache_id == "group-all":
            return list(self.files.values())
        return [self.by_file_id(cache_id.removeprefix("cache-"))]

    def inline_image(self, data: bytes) -> Chunk:
        if not data.startswith(b"\x89PNG"):
            raise InvalidImage("not an image")
        return image_chunk(digest(data)[:8])

    def inline_text(self, text: str, label: str | None) -> Chunk:
        return Chunk(ChunkKey.of_text(text), "alice", token_ids=self.tokenize(text), label=label)


def image_chunk(name: str) -> Chunk:
    return Chunk(ChunkKey("image", digest(name)), "alice", label=name, file_id=f"file-{name}")
