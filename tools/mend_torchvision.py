"""Makes torchvision, torchaudio and torchcodec harmless where a CPU build of torch meets their CUDA builds.

PyPI's torchvision wheel is built for CUDA. Beside a CPU torch its `_C.so` cannot be loaded, so the
`torchvision::` operators are never defined, and `import torchvision` dies with

    RuntimeError: operator torchvision::nms does not exist

and takes with it everything that imports it (transformers' image processors, open_clip). The
operators themselves (box NMS, RoI pooling) are not needed: it is enough that their schemas exist.

vLLM's CPU build brings torchaudio and torchcodec along. Their libraries do not fit either, and

    OSError: Could not load this library: .../torchaudio/lib/_torchaudio.abi3.so

takes with it all of transformers' processors, which import torchaudio when it is installed. torchaudio
works without its library where that is merely absent, and users of torchcodec do without it where it
says ImportError: the hook has both say so.

    python tools/mend_torchvision.py     # mends the environment of the python that runs it

When a plain import fails in exactly these ways, the script copies itself into site-packages as
`_mend_torchvision.py` beside a `.pth` file, which reaches every python of the environment,
subprocesses too. From then on torchvision's missing schemas are declared just before it is first
imported, unless torchvision's own library loads. Using such an operator still raises torchvision's own
error ("Couldn't load custom C++ ops"). When the plain imports work, nothing is written and an earlier
mend is removed.
"""

import sys

MODULE = "_mend_torchvision"
SYMPTOMS = {
    "torchvision": "operator torchvision::",
    "torchaudio": "Could not load this library",
    "torchcodec": "Could not load this library",
}
"""The last line of a failing import when it fails in the way this script mends."""


class _Finder:
    """Finds the packages as usual, and changes how they are loaded."""

    def find_spec(self, name, path=None, target=None):
        wrap = _WRAPPERS.get(name)
        if wrap is None:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None and spec.origin:
            plain = spec.loader.exec_module
            spec.loader.exec_module = lambda module: wrap(plain, module, spec.origin)
        return spec


def install_hook():
    """Install the hook. The `.pth` file calls it when python starts: it is cheap and imports nothing."""
    if not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _load_torchvision(plain, module, origin):
    declare_operators(origin)
    plain(module)


def _load_torchaudio_utils(plain, module, origin):
    """Treat a library that cannot be loaded as one that does not exist."""
    plain(module)
    load = module._load_lib

    def load_if_possible(name):
        try:
            return load(name)
        except OSError:
            return False

    module._load_lib = load_if_possible


def _load_torchcodec(plain, module, origin):
    try:
        plain(module)
    except OSError as error:
        raise ImportError(f"torchcodec does not fit this torch: {error}") from error


_WRAPPERS = {
    "torchvision": _load_torchvision,
    "torchaudio._extension.utils": _load_torchaudio_utils,
    "torchcodec": _load_torchcodec,
}


def declare_operators(torchvision_init):
    """Declare the `torchvision::` schemas that the package's python files register something for."""
    import re
    from pathlib import Path

    import torch

    package = Path(torchvision_init).parent
    for library in [*package.glob("_C*.so"), *package.glob("_C*.pyd")]:
        try:
            torch.ops.load_library(str(library))
            return  # the library fits this torch, so the real operators exist
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


def _import_error(name, hooked):
    """Return what `import NAME` says in a new python, with or without our hook; None when it works."""
    import subprocess

    code = f"import {name}"
    if not hooked:
        keep = f"[f for f in sys.meta_path if type(f).__name__ != {_Finder.__name__!r}]"
        code = f"import sys; sys.meta_path[:] = {keep}; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr


def _is_mended(name, error):
    """Return whether a hooked import had the intended result, which for torchcodec is an ImportError."""
    return error is None or (name == "torchcodec" and "ImportError: torchcodec does not fit" in error)


def main():
    import importlib.util
    import shutil
    import sysconfig
    from pathlib import Path

    site = Path(sysconfig.get_paths()["purelib"])
    module, pth = site / f"{MODULE}.py", site / f"{MODULE}.pth"
    installed = [name for name in SYMPTOMS if importlib.util.find_spec(name) is not None]
    errors = {name: error for name in installed if (error := _import_error(name, hooked=False))}
    broken = [name for name, error in errors.items() if SYMPTOMS[name] in error]
    # torchcodec may want FFmpeg, which we do not need
    for name in errors.keys() - set(broken) - {"torchcodec"}:
        print(f"{name}: import fails, and not in the way this script mends:\n{errors[name]}", file=sys.stderr)
        return 1
    if not broken:
        pth.unlink(missing_ok=True)
        module.unlink(missing_ok=True)
        print(f"{', '.join(installed) or 'torchvision'}: nothing to mend")
        return 0
    if Path(__file__).resolve() != module.resolve():
        shutil.copyfile(__file__, module)
    pth.write_text(f"import {MODULE}; {MODULE}.install_hook()\n", encoding="utf-8")
    for name in broken:
        error = _import_error(name, hooked=True)
        if not _is_mended(name, error):
            print(f"{name}: still does not import after the mend:\n{error}", file=sys.stderr)
            return 1
    print(f"{', '.join(broken)}: built for another torch; python does without their libraries from now on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
