"""The bundled models that tests run on: those of the first generation, because they are quick. Only
``tests/lab/test_default_model.py`` is about the default one."""

from pathlib import Path

from mpic.data.bundled import SAMPLES, model_folder

SMALL = model_folder("demo")
SMALL_PLAIN = model_folder("demo-plain")
SMALL_SAMPLES: Path = SAMPLES["demo"]
