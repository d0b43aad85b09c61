"""Generated data of the demo models: images, documents, conversations, tokenizer, chat template.

Everything is drawn from a seed; nothing is downloaded. `Generator(seed, split)` draws conversations;
`split="eval"` uses sprites, names, handles, filler sentences and question wordings that training never sees.
"""

from mpic_lab.generator.conversation import (
    Conversation,
    ConversationSegment,
    Document,
    Image,
    Turn,
    messages,
    segments,
)
from mpic_lab.generator.tasks import EVAL_TASKS, Generator

__all__ = [
    "EVAL_TASKS",
    "Conversation",
    "ConversationSegment",
    "Document",
    "Generator",
    "Image",
    "Turn",
    "messages",
    "segments",
]
