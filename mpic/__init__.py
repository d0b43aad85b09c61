"""MPIC: serving multimodal LLMs with position-independent KV caching."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mpic")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
