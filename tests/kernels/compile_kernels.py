"""Run by ``test_triton_compile.py`` in a process without the interpreter: compile the kernels to machine code for GPUs
that need not be there, and print the resources of each as JSON, one kernel per line.

    compile_kernels.py ARCH... [all]

``all`` compiles every group size and head size, with the tiles that the engine launches for them.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mpic.kernels.triton import attention, merge, scatter
from mpic.kernels.triton.launch import Geometry, tile_sizes
from mpic.kernels.triton.tiles import power
from mpic.kernels.triton.tuning import LARGE, defaults

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FLOATS = dict.fromkeys(("lse", "part", "part_lse", "cos", "sin"), "*fp32")
TABLES = dict.fromkeys(
    ("items", "rows", "rotation_of", "first_rows", "floors", "merged", "ends", "partial_of"), "*i32"
)
TABLES |= dict.fromkeys(("segments", "targets"), "*i64")
STRIDES = ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")


def compiled(fn, dtype, constants, arch, warps, stages=2) -> dict[str, object]:
    data = {name: f"*{NAMES[dtype]}" for name in ("q", "k", "v", "anchor")}
    known = data | FLOATS | TABLES | {"out": f"*{NAMES[dtype]}", "scale": "fp32", "softcap": "fp32"}
    signature, values, hints = {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(i,)] = constants[name]
            continue
        signature[name] = known.get(name, "i32")
        if signature[name].startswith("*") or name in STRIDES:
            hints[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=values, attrs=hints)
    options = {"num_warps": warps, "num_stages": stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(kernel.asm["cubin"])
        binary.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", binary.name], capture_output=True, text=True).stdout
    numbers = dict(part.split(":") for part in usage.split() if part.count(":") == 1 and part[-1].isdigit())
    ptx = kernel.asm["ptx"]
    return {
        "kernel": fn.__name__,
        "arch": arch,
        "dtype": NAMES[dtype],
        "shared": kernel.metadata.shared,
        "registers": int(numbers.get("REG", -1)),
        "stack": int(numbers.get("STACK", -1)),
        "wide_copies": ptx.count("cp.async.cg"),
        "tensor_cores": ptx.count("mma.sync") + ptx.count("wgmma.mma_async"),
    }


def attend(
    dtype, dim: int, arch: int, tile: str, group: int = 4, large=True, **features: bool
) -> dict[str, object]:
    """Compile for a kind of tile (block, shared, lone) as the engine launches it.

    Args:
        large: the GPU is one with much shared memory.
        features: holes, floors, softcap.
    """
    sizes = tile_sizes(Geometry(group, 1, dim, dim // 2), defaults(dtype, dim, LARGE if large else 0))
    size = dict(zip(("block", "shared", "lone"), sizes, strict=True))[tile]
    has = {name: features.get(name, False) for name in ("holes", "floors", "softcap")}
    constants = {"GROUP": group, "DIM": dim, "DIM_PAD": power(dim), "HALF": dim // 2, "INTERLEAVED": False}
    constants |= {"HOLES": has["holes"], "FLOORED": has["floors"], "SOFTCAP": has["softcap"]}
    constants |= {"PRECISION": "ieee", "WIDEN": False, "BLOCK_M": size.queries, "BLOCK_N": size.keys}
    found = compiled(attention.attend, dtype, constants, arch, size.warps, size.stages)
    return found | {"dim": dim, "group": group, "tile": tile, **size._asdict(), "large": large, **has}


def everything(half: torch.dtype, arch: int) -> Iterator[dict[str, object]]:
    for tile in ("shared", "lone"):  # as they are captured
        yield attend(half, 128, arch, tile, holes=True)
    dims = (128, 64, 256, 80, 96, 192)
    for dim, group, tile in itertools.product(dims, (4, 1, 7), ("block", "shared", "lone")):
        yield attend(half, dim, arch, tile, group)


def main(*arguments: str) -> None:
    half = torch.bfloat16
    for arch in (int(argument) for argument in arguments if argument != "all"):
        if "all" in arguments:
            results = everything(half, arch)
        else:
            first = [attend(half, 128, arch, "block", large=False), attend(half, 128, arch, "lone")]
            results = iter(first + ([] if arch < 90 else the_others(half, arch)))
        for result in results:
            print(json.dumps(result), flush=True)


def the_others(half: torch.dtype, arch: int) -> list[dict[str, object]]:
    return [
        attend(half, 80, arch, "block", large=False, holes=True),
        attend(half, 128, arch, "block", floors=True, softcap=True),
        attend(torch.float16, 256, arch, "block", large=False),
        attend(torch.float32, 64, arch, "block", large=False),
        compiled(merge.merge, half, {"DIM": 128, "DIM_PAD": 128, "BLOCK_S": 16}, arch, 4),
        compiled(scatter.scatter, half, {"DIM": 128, "DIM_PAD": 128, "BLOCK": 16}, arch, 4),
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
