"""The sections of the GPU report, in the order in which they run: the most valuable come first.

The limits are several times the expected times on a GPU of the H100's class; together the sections are
expected to take about 10 minutes.
"""

from __future__ import annotations

from mpic_lab.gpu.supervise import Section

BASE = ("torch", "numpy")
KERNELS = (*BASE, "triton")
MODELS = (*BASE, "transformers", "safetensors", "psutil", "PIL", "xxhash", "jinja2")
HERE = "mpic_lab.gpu"

SECTIONS: tuple[Section, ...] = (
    Section("machine", f"{HERE}.machine:versions", 60, "versions, what is missing, the device", BASE),
    Section("ceilings", f"{HERE}.machine:measure_ceilings", 90, "what the device can do at most", MODELS),
    Section("selftest", f"{HERE}.model_checks:self_tests", 180, "self-tests on real shapes; reloads", MODELS),
    Section("link", f"{HERE}.first_tokens:link", 150, "first token over 8 resident images", MODELS),
    Section("decode", f"{HERE}.decoding:decode", 240, "decoding at batch 1 to 64, 4k and 32k", MODELS),
    Section("headline", f"{HERE}.first_tokens:headline", 300, "1 to 10 images under each policy", MODELS),
    Section("loads", f"{HERE}.loads:loads", 180, "links over stored chunks, cold and warm", MODELS),
    Section("tuning", f"{HERE}.kernel_times:tuning", 150, "tile sizes, a small choice", MODELS),
    Section(
        "tests", f"{HERE}.suite:tests", 240, "the kernels' own test files", (*KERNELS, "pytest", "hypothesis")
    ),
)
