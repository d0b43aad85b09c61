"""vLLM, imported once in the process that ``sweep`` forks others from. To be preloaded, for nothing but this effect."""

from __future__ import annotations

import importlib
from contextlib import suppress

from mpic.config import ConfigError
from mpic.engine.vllm.frontend.options import prepare_environment

with suppress(ConfigError):  # each check says it again, where it can be told
    prepare_environment()
    for name in ("vllm.model_executor.models", "mpic.engine.vllm.frontend.engine"):
        importlib.import_module(name)
