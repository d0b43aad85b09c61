"""For all tests: one thread a process. The models are tiny, and waiting for a second core costs more than it gives."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
