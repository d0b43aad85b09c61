"""The Python SDK: ``from mpic import MPIC, AsyncMPIC``. Importing it loads neither torch nor the server."""

from mpic.client.client import MPIC, AsyncMPIC
from mpic.client.errors import BadResponse, ClientClosed, ClientError, TimedOut, Unreachable
from mpic.client.httpx_options import DEFAULT_URL
from mpic.client.inprocess import AsyncInProcess, InProcess
from mpic.client.listing import AsyncListing, Listing
from mpic.client.retry import Retry
from mpic.client.sources import data_url
from mpic.client.stream import AsyncStream, Stream

__all__ = [
    "DEFAULT_URL",
    "MPIC",
    "AsyncInProcess",
    "AsyncListing",
    "AsyncMPIC",
    "AsyncStream",
    "BadResponse",
    "ClientClosed",
    "ClientError",
    "InProcess",
    "Listing",
    "Retry",
    "Stream",
    "TimedOut",
    "Unreachable",
    "data_url",
]

# as httpx does it, so that tracebacks and repr show the module that users import a name from
for _name in __all__:
    if hasattr(_value := globals()[_name], "__qualname__"):
        _value.__module__ = __name__
