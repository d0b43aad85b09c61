"""Segment attention: a slow reference, the CPU implementation, Triton; rotary; quantization.

Imported as `mpic.kernels`. This file imports nothing: with the repository root on `sys.path`, transformers
finds this folder when it looks for the library named `kernels`, and must find it empty.
"""
