"""Triton kernels of a step on CUDA, and their host side.

``tiles``, ``worklist`` and ``tuning`` need no Triton; ``step`` and the kernels do. Nothing imports them before the
implementation ``triton`` is asked for, so machines without Triton (macOS) run everything else.
"""
