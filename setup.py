"""The folders that become packages; everything else about the project is in pyproject.toml.

Four top-level folders are imported as parts of `mpic`, so that no generic name such as `kernels` lands
in the import root; `lab` is the package `mpic_lab`, the laboratory, which an image of the server leaves out. Every
folder with an `__init__.py` below these roots is a package, in wheels and in editable installs alike; nothing is
listed by hand.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOTS = {
    "mpic": "mpic",
    "mpic.kernels": "kernels",
    "mpic.retriever": "retriever",
    "mpic.webui": "webui",
    "mpic.data": "data",
    "mpic_lab": "lab",
}


def packages() -> dict[str, str]:
    """Package name -> folder, relative to the repository root."""
    here, found = Path(__file__).parent, {}
    for package, folder in ROOTS.items():
        if (here / folder / "__init__.py").exists():
            found[package] = folder
            for name in find_packages(str(here / folder)):
                found[f"{package}.{name}"] = f"{folder}/{name.replace('.', '/')}"
    return found


if __name__ == "__main__":
    setup(packages=sorted(packages()), package_dir=ROOTS)
