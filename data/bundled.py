"""The demo models that come with the program, the samples that each can be asked about."""

from __future__ import annotations

from pathlib import Path

from mpic.data import DEFAULT

HERE = Path(__file__).parent
_LARGE = HERE / "samples-large"
SAMPLES = {"demo": HERE / "samples", "demo-plain": HERE / "samples", "large": _LARGE, "large-plain": _LARGE}
"""Demo model -> the folder of its samples. `demo` is of the first generation, `large` of the second; the plain ones
have had ordinary training only (docs/demo-model.md)."""

REFERENCES = {1: HERE / "references", 2: HERE / "references-large"}
"""Generation of the demo models -> the folder of its reference set."""


def model_folder(name: str = DEFAULT) -> Path:
    """Return the folder of a bundled model."""
    return HERE / "models" / name


def samples_folder(model: str) -> Path:
    """Return the samples to ask a model about, by its name or folder; those of the default model for any other."""
    return SAMPLES.get(Path(model).name, SAMPLES[DEFAULT])


def generation_for(context: int) -> int:
    """Return the generation whose images and documents suit a model with so many tokens of context: the second, whose
    sizes are those of the papers, where ten documents of 300 to 1,000 tokens fit, else the first."""
    return 2 if context >= 8192 else 1
