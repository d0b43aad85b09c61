"""The imports of the two halves of the vLLM engine."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import mpic

PACKAGE = "mpic.engine.vllm"
ROOT = Path(mpic.__file__).parent


def module_of(path: Path) -> str:
    parts = ("mpic", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Every name that a file imports anywhere, for type checking too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


FILES = sorted((ROOT / "engine" / "vllm").rglob("*.py"))
OLD_PATHS = {"connector": "MPICConnector", "scheduler": "LinkScheduler", "worker": "LinkWorker"}


@pytest.mark.parametrize(("half", "other"), [("frontend", "plugin"), ("plugin", "frontend")])
def test_a_half_imports_nothing_of_the_other(half, other):
    files = [path for path in FILES if path.parent.name == half or path.stem == "wire"]
    assert len(files) > 5
    pairs = [(module_of(path), name) for path in files for name in imports(path)]
    assert not [(module, name) for module, name in pairs if name.startswith(f"{PACKAGE}.{other}")]


def test_only_vllm_loads_the_plugin():
    others = [path for path in ROOT.rglob("*.py") if path.parent.name != "plugin"]
    importing = [path for path in others if any(n.startswith(f"{PACKAGE}.plugin") for n in imports(path))]
    assert sorted(path.stem for path in importing) == sorted(OLD_PATHS), "the paths of earlier command lines"


def test_there_is_no_import_circle():
    names = {module_of(path) for path in FILES}
    graph = {module_of(path): (imports(path) & names) - {PACKAGE} for path in FILES}
    assert len(tuple(TopologicalSorter(graph).static_order())) == len(FILES)


@pytest.mark.parametrize(("module", "name"), OLD_PATHS.items())
def test_command_lines_written_for_earlier_paths_load_the_same_classes(module, name):
    old, new = (import_module(f"{PACKAGE}.{folder}{module}") for folder in ("", "plugin."))
    assert getattr(old, name) is getattr(new, name)
