"""Make `import torchvision` work where a CPU build of torch meets a CUDA build of torchvision.

PyPI's torchvision wheel is built for CUDA. Beside a CPU torch its `_C.so` cannot be loaded, so the
`torchvision::` operators are never defined, and `import torchvision` dies with

    RuntimeError: operator torchvision::nms does not exist

and takes with it everything that imports it (transformers' image processors, open_clip). The
operators themselves (box NMS, RoI pooling) are not needed: it is enough that their schemas exist.

    python tools/mend_torchvision.py     # mends the environment of the python that runs it

When the plain import fails in exactly this way, the script copies itself into site-packages as
`_mend_torchvision.py` beside a `.pth` file, which reaches every python of the environment,
subprocesses too. From then on the missing schemas are declared just before torchvision is first
imported, unless torchvision's own library loads. Using such an operator still raises torchvision's own
error ("Couldn't load custom C++ ops"). When the plain import works, nothing is written and an earlier
mend is removed.
"""

import sys

MODULE = "_mend_torchvision"
SYMPTOM = "operator torchvision::"


class _Finder:
    """Finds torchvision as usual, and has its loader declare the operators first."""

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None and spec.origin:
            plain = spec.loader.exec_module

            def exec_module(module):
                declare_operators(spec.origin)
                plain(module)

            spec.loader.exec_module = exec_module
        return spec


def install_hook():
    """Called by the `.pth` file when python starts: cheap, imports nothing."""
    if not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def declare_operators(torchvision_init):
    """Declare the `torchvision::` schemas that the package's python files register something for."""
    import re
    from pathlib import Path

    import torch

    package = Path(torchvision_init).parent
    for library in [*package.glob("_C*.so"), *package.glob("_C*.pyd")]:
        try:
            torch.ops.load_library(str(library))
            return  # it fits this torch: the real operators are there
        except (ImportError, OSError):
            pass
    names = set()
    for path in (package / "_meta_registrations.py", package / "_autograd_registrations.py"):
        if path.exists():
            text = path.read_text(encoding="utf-8")
            names.update(re.findall(r'register_meta\(\s*"(\w+)"', text))
            names.update(re.findall(r'"torchvision::(\w+)"', text))
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in sorted(names):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor a) -> Tensor")
    sys.modules[__name__]._library = library  # the schemas live as long as this object


def _import_error(hooked):
    """What `import torchvision` says in a new python, with or without our hook; None when it works."""
    import subprocess

    code = "import torchvision"
    if not hooked:
        keep = f"[f for f in sys.meta_path if type(f).__name__ != {_Finder.__name__!r}]"
        code = f"import sys; sys.meta_path[:] = {keep}; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr


def main():
    import importlib.util
    import shutil
    import sysconfig
    from pathlib import Path

    site = Path(sysconfig.get_paths()["purelib"])
    module, pth = site / f"{MODULE}.py", site / f"{MODULE}.pth"
    if importlib.util.find_spec("torchvision") is None:
        print("torchvision: not installed, nothing to mend")
        return 0
    error = _import_error(hooked=False)
    if error is None:
        pth.unlink(missing_ok=True)
        module.unlink(missing_ok=True)
        print("torchvision: imports as it is, nothing to mend")
        return 0
    if SYMPTOM not in error:
        print(f"torchvision: import fails, and not in the way this script mends:\n{error}", file=sys.stderr)
        return 1
    if Path(__file__).resolve() != module.resolve():
        shutil.copyfile(__file__, module)
    pth.write_text(f"import {MODULE}; {MODULE}.install_hook()\n", encoding="utf-8")
    error = _import_error(hooked=True)
    if error is not None:
        print(f"torchvision: still does not import after the mend:\n{error}", file=sys.stderr)
        return 1
    print("torchvision: its library does not fit this torch; operator schemas are now declared at import")
    return 0


if __name__ == "__main__":
    sys.exit(main())
