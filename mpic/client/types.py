"""The objects in the server's responses, under their names in the SDK.

They are frozen; ``model_dump()`` converts one back to a dictionary. OpenAI's fields have OpenAI's names and meaning.
"""

from mpic.api.base import Deleted
from mpic.api.base import ItemPage as Page
from mpic.api.completion import AnswerMessage as Message
from mpic.api.completion import (
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChunkChoice,
    ChunkUsed,
    Milliseconds,
    MPICUsage,
    PromptTokensDetails,
    RetrievalRound,
    TokenCounts,
    Trace,
    TraceSpan,
    TraceTimes,
    UnlinkedHandle,
    Usage,
)
from mpic.api.completion import ChunkDelta as Delta
from mpic.api.resources import CacheChunkObject as CacheChunk
from mpic.api.resources import CacheObject as Cache
from mpic.api.resources import EngineState, Health, ServedModel
from mpic.api.resources import FileObject as File
from mpic.api.resources import IndexState as ReferenceIndex
from mpic.api.resources import ModelObject as Model
from mpic.api.resources import ReferenceFound as ReferenceHit
from mpic.api.resources import ReferenceObject as Reference
from mpic.api.resources import SyncState as ReferenceSync
from mpic.api.resources import UploadObject as Upload
from mpic.api.resources import UploadPartObject as UploadPart
from mpic.api.savings import Savings

__all__ = [
    "Cache",
    "CacheChunk",
    "ChatCompletion",
    "ChatCompletionChunk",
    "Choice",
    "ChunkChoice",
    "ChunkUsed",
    "Deleted",
    "Delta",
    "EngineState",
    "File",
    "Health",
    "MPICUsage",
    "Message",
    "Milliseconds",
    "Model",
    "Page",
    "PromptTokensDetails",
    "Reference",
    "ReferenceHit",
    "ReferenceIndex",
    "ReferenceSync",
    "RetrievalRound",
    "Savings",
    "ServedModel",
    "TokenCounts",
    "Trace",
    "TraceSpan",
    "TraceTimes",
    "UnlinkedHandle",
    "Upload",
    "UploadPart",
    "Usage",
]
