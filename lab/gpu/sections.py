"""The sections of the GPU report, in the order in which they run: the most valuable come first.

The limits are several times the expected times on a GPU of the H100's class; together the sections are
expected to take about 15 minutes.
"""

from __future__ import annotations

from mpic_lab.gpu.supervise import Section

BASE = ("torch", "numpy")
KERNELS = (*BASE, "triton")
MODELS = (*BASE, "transformers", "safetensors", "psutil", "PIL", "xxhash", "jinja2")
VLLM = (*MODELS, "vllm", "platformdirs")
HERE = "mpic_lab.gpu"

SECTIONS: tuple[Section, ...] = (
    Section("machine", f"{HERE}.machine:versions", 60, "versions, what is missing, the device", BASE),
    Section("ceilings", f"{HERE}.machine:measure_ceilings", 90, "what the device can do at most", MODELS),
    Section(
        "kernels", f"{HERE}.kernel_checks:kernels", 200, "attention kernels against the reference", KERNELS
    ),
    Section(
        "copies", f"{HERE}.copy_checks:copies", 60, "copies beside computing; chunks into pages", KERNELS
    ),
    Section("selftest", f"{HERE}.model_checks:self_tests", 180, "self-tests on real shapes; reloads", MODELS),
    Section("profile", f"{HERE}.profile:profile", 150, "launches and busy share of a step", MODELS),
    Section("graphs", f"{HERE}.graphs:graphs", 180, "decoding with CUDA graphs and without", MODELS),
    Section("link", f"{HERE}.first_tokens:link", 150, "first token over 8 resident images", MODELS),
    Section("decode", f"{HERE}.decoding:decode", 240, "decoding at batch 1 to 64, 4k and 32k", MODELS),
    Section("headline", f"{HERE}.first_tokens:headline", 300, "1 to 10 images under each policy", MODELS),
    Section("loads", f"{HERE}.loads:loads", 180, "links over stored chunks, cold and warm", MODELS),
    Section("dma", f"{HERE}.loads:dma", 60, "host memory to the device and back", MODELS),
    Section("attention", f"{HERE}.kernel_times:attention", 120, "kernels against ceilings and torch", MODELS),
    Section("tuning", f"{HERE}.kernel_times:tuning", 150, "tile sizes, a small choice", MODELS),
    Section(
        "tests", f"{HERE}.suite:tests", 240, "the kernels' own test files", (*KERNELS, "pytest", "hypothesis")
    ),
    Section("vllm", f"{HERE}.inside_vllm:first_tokens", 300, "1 to 10 images inside vLLM", VLLM, True),
    Section("vllm-decode", f"{HERE}.inside_vllm:decode", 280, "vLLM's decoding beside ours", VLLM, True),
    Section("vllm-bench", f"{HERE}.suite:vllm", 280, "links inside vLLM beside answers", VLLM, True),
)
