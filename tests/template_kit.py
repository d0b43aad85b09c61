"""Helpers for tests of chat templates: renderings of ``mpic.prompt``, and renderings and tokens of transformers
itself."""

import copy

from chat_models import BUILD, DictResolver, processor

from mpic.prompt import ChatTemplate, TextSegment, build_prompt
from mpic.prompt.messages import Ref, parse_messages

TEMPLATES = {family: ChatTemplate(processor(family)) for family in BUILD}
FILES = {"REPORT": "profit rose </s><image> by half", "NOTES": "the lazy dog"}


def resolver(family):
    return DictResolver(TEMPLATES[family].tokenize_document, ("EIFFEL", "LOUVRE", "ORSAY"), FILES)


def pieces(family, messages, tools=None):
    return TEMPLATES[family].pieces(parse_messages(messages, resolver(family)), tools)


def prompt(family, messages, tools=None):
    return build_prompt(messages, TEMPLATES[family], resolver(family), tools)


def show(pieces):
    """The rendering with chunks as ``@name@``."""
    return "".join(f"@{p.name or p.chunk.label}@" if isinstance(p, Ref) else p for p in pieces)


def as_parts(messages):
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def stock(family, messages, **kwargs):
    """Return the prompt that transformers itself renders."""
    own = processor(family)
    tokenizer = getattr(own, "tokenizer", own)
    template = getattr(own, "chat_template", None) or tokenizer.chat_template or TEMPLATES[family]._source
    return tokenizer.apply_chat_template(
        copy.deepcopy(messages), tokenize=False, add_generation_prompt=True, chat_template=template, **kwargs
    )


def stock_ids(family, text):
    """The stock ids of a rendered text, BOS once."""
    tokenizer = TEMPLATES[family].tokenizer
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def flat(family, built):
    """A prompt's ids with one image placeholder for every image."""
    image = TEMPLATES[family].image_token
    token = TEMPLATES[family].tokenizer.convert_tokens_to_ids(image) if image else None
    ids = []
    for segment in built.segments:
        ids += segment.token_ids if isinstance(segment, TextSegment) else (segment.chunk.token_ids or [token])
    return ids
