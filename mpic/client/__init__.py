"""The Python SDK: ``from mpic import MPIC, AsyncMPIC``. Imports neither torch nor the server."""

from mpic.client.aio import AsyncMPIC
from mpic.client.base import DEFAULT_URL
from mpic.client.errors import BadResponse, ClientError, TimedOut, Unreachable
from mpic.client.inprocess import AsyncInProcess, InProcess
from mpic.client.sources import data_url
from mpic.client.stream import AsyncStream, Stream
from mpic.client.sync import MPIC

__all__ = [
    "DEFAULT_URL",
    "MPIC",
    "AsyncInProcess",
    "AsyncMPIC",
    "AsyncStream",
    "BadResponse",
    "ClientError",
    "InProcess",
    "Stream",
    "TimedOut",
    "Unreachable",
    "data_url",
]
