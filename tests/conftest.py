"""For all tests: one thread a process, because the models are tiny and waiting for a second core costs more than it
gives; and no deadlines, because machines differ."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():  # before anything imports Triton: its kernels then run in the interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("mpic", deadline=None)
settings.load_profile("mpic")
