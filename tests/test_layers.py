"""The import graph: packages depend only on those below them, and no modules import each other in a circle."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {name: f"mpic.{name}" for name in ("kernels", "retriever", "webui", "data")} | {"lab": "mpic_lab"}
"""Top-level folders that are parts of the package (``setup.py``)."""

LAYERS = [
    {"errors", "cancel", "table", "cgroup", "limits", "version", "file_status", "handles"},
    {"database", "memory", "bounded_json", "config_values", "data", "method"},
    {"durable", "key_file", "imaging", "press"},
    {"kernels", "keys"},
    {"kv", "link"},
    {"model", "prompt", "library"},
    {"config", "packet"},
    {"engine", "retriever", "api"},
    {"client", "http"},
    {"webui", "preflight"},
    {"server"},
    {"local"},
    {"cli"},
    {"lab"},
]
"""Packages from the bottom to the top. One may import what stands below it, not what stands beside or above it."""

SHARED_NAMES = {
    "Settings": "the settings of a bench or of a trainer, one for each command",
    **dict.fromkeys(("Request", "Status", "LinkedChunk"), "a request in each of the two engines"),
    **dict.fromkeys(
        ("RetrievalRound", "TokenLogprob", "TraceSpan"), "an engine's record, and the same on the wire"
    ),
    "WithoutFullGraphs": "the same for each of vLLM's two model runners",
    "MPIC": "the policy, and the client",
    "Random": "the policy that selects at random, and the press that does",
}
"""Classes of one name that are one idea in several places, or that users know by this name."""


def sources() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for folder in ("mpic", *FOLDERS):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join((*FOLDERS.get(parts[0], parts[0]).split("."), *parts[1:]))
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def trees() -> dict[str, ast.Module]:
    """Return every module of the package, parsed."""
    return {name: ast.parse(path.read_text()) for name, path in sources().items()}


@cache
def imports() -> dict[str, set[str]]:
    """Return for every module our modules that it imports anywhere, for type checking, too."""
    modules = sources()
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        graph[name] = set()
        for node in ast.walk(trees()[name]):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    base = ".".join(
                        [*package.split(".")[: len(package.split(".")) - node.level + 1], base]
                    ).strip(".")
                targets = [f"{base}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                known = target if target in modules else target.rpartition(".")[0]
                if known in modules and known != name:
                    graph[name].add(known)
    return graph


def package_of(module: str) -> str:
    """Return the package of a module of ours; the laboratory is one."""
    if module.partition(".")[0] == "mpic_lab":
        return "lab"
    return module.split(".")[1] if "." in module else ""


def test_no_modules_import_each_other_in_a_circle():
    TopologicalSorter(imports()).prepare()  # raises CycleError, which names the modules


@pytest.mark.parametrize("package", sorted(set().union(*LAYERS)))
def test_a_package_imports_only_packages_below_it(package):
    level = next(i for i, layer in enumerate(LAYERS) if package in layer)
    below = set().union(*LAYERS[:level])
    above = defaultdict(list)
    for module, targets in imports().items():
        if package_of(module) == package:
            for target in targets:
                other = package_of(target)
                if other not in {package, ""} | below:
                    above[other].append(f"{module} -> {target}")
    assert not above, dict(above)


def test_every_package_has_its_layer():
    assert {package_of(m) for m in sources()} - {""} == set().union(*LAYERS)


def test_one_class_name_stands_for_one_idea():
    places = defaultdict(set)
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].add(name)
    several = {name: sorted(found) for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in several.items() if name not in SHARED_NAMES} == {}
    assert set(SHARED_NAMES) <= set(several), "a name that is listed is not shared any more"


def test_every_type_error_that_is_ignored_names_its_rule_and_gives_a_reason():
    bare = re.compile(r"# *(type|pyright|mypy): *ignore|# *ty: *ignore(?!\[[a-z-]+(, [a-z-]+)*\] \(\S.*\)$)")
    for path in sources().values():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not bare.search(line), f"{path}:{number}"
