"""Compiles every kernel for devices that are not there, and prints what came of it as JSON.

A program of its own: `python -m helpers.harnesses.kernel_compiling 80 90 100`. Where kernels are
interpreted they cannot be compiled, and which of the two is settled when they are defined.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from equipoise.backends.cuda.kernels import (
    checksums,
    counting,
    engine_rules,
    hash_routing,
    levelled_routing,
    quota_routing,
    share_solver,
    table_commit,
)
from equipoise.backends.cuda.kernels.workspace import Sizes, power_of_two
from equipoise.hal.levelled_routing import SWEEPS_ALONE, SWEEPS_OF_GROUP

LARGE = Sizes(experts=256, slots=288, ranks=32, elements=1 << 17, buffers=8)
LONG = {"generation", "sums", "out", "water", "slot_loads"}
"""Arguments that point to int64; the others point to int32."""
TABLES = {"LAYERS": 58, "EXPERTS": LARGE.experts, "SLOTS": LARGE.slots}
BLOCK = {"BINS": 256, "BLOCK": 512, "ALONE": False}
NUMBERED = {**BLOCK, "BLOCK": 256}
WIDE = tuple(
    Sizes(experts=256, slots=2 * ranks, ranks=ranks, elements=1, buffers=8)
    for ranks in (256, 320, 1024)
)
"""Decoding of DeepSeek-V3 is on 320 ranks; there a warp of the solver has as many as it may."""


@dataclass(frozen=True)
class Compiled:
    """What a kernel came to.

    Attributes:
        name: of the kernel.
        target: compute capability.
        stack: bytes of local memory a thread: spills, and arrays that are indexed.
        ptx: the code.
    """

    name: str
    target: int
    stack: int
    ptx: str


def solving(sizes: Sizes) -> tuple[Any, int, dict[str, Any]]:
    """The solver with its warps and sizes."""
    constants = {
        "LAYERS": TABLES["LAYERS"],
        "EXPERTS": sizes.experts,
        "SLOTS": sizes.slots,
        "PER_RANK": sizes.slots // sizes.ranks,
        "SWEEPS": 32,
        "SPARE": sizes.spare,
        "PLURAL": power_of_two(sizes.spare),
        "LANES": sizes.lanes,
    }
    return share_solver.solve_kernel, share_solver.warps(sizes.lanes), constants


LEVELLED = (
    LARGE,
    *(
        Sizes(experts=256, slots=slots, ranks=ranks, elements=1, buffers=8)
        for ranks, slots in ((64, 320), (128, 384), (320, 640))
    ),
)
"""One expert or more a rank is there twice."""


def levelling(sizes: Sizes, wide: bool) -> tuple[Any, int, dict[str, Any]]:
    """A small batch; one of a group, `wide`, takes the most registers of all that level."""
    warps, copies = levelled_routing.level_shape(sizes.entries)
    constants = {
        "LAYERS": TABLES["LAYERS"],
        "EXPERTS": sizes.experts,
        "SLOTS": sizes.slots,
        "PER_RANK": sizes.slots // sizes.ranks,
        "BINS": 256,
        "ENTRIES": sizes.entries,
        "WARP_COPIES": copies,
        "GROUPED": wide,
        "SWEEPS": SWEEPS_OF_GROUP if wide else SWEEPS_ALONE,
        "STEPS": 3,
        "BLOCK": 256,
        "WHOLE": 1024,
    }
    return levelled_routing.level_small_kernel, warps, constants


def levelling_of_counts() -> tuple[Any, int, dict[str, Any]]:
    """The counts of a larger batch of a group."""
    _, warps, small = levelling(LARGE, wide=True)
    left_out = ("GROUPED", "STEPS", "BLOCK", "WHOLE")
    constants = {name: value for name, value in small.items() if name not in left_out}
    return levelled_routing.level_kernel, warps, {**constants, "WIDE": True}


def everything() -> list[tuple[Any, int, dict[str, Any]]]:
    """Kernels with their warps and sizes, as a layer of 256 experts launches them."""
    alone = {**BLOCK, "BLOCK": 1024, "ALONE": True}
    small = {**TABLES, **NUMBERED, "STEPS": 3}
    return [
        (counting.count_kernel, 8, {"EXPERTS": 256, **BLOCK}),
        (hash_routing.hash_kernel, 8, {**TABLES, **BLOCK, "STEPS": 3}),
        (hash_routing.hash_kernel, 8, {**TABLES, **alone, "STEPS": 3}),
        (engine_rules.row_hash_kernel, 8, {**TABLES, **BLOCK}),
        (engine_rules.block_turns_kernel, 4, {**TABLES, **NUMBERED, "TURNS": 1024}),
        (quota_routing.count_blocks_kernel, 4, {"EXPERTS": 256, "BINS": 256, "BLOCK": 256}),
        (quota_routing.add_up_kernel, 4, {"EXPERTS": 256, "ROWS": 256, "TILE": 8}),
        (quota_routing.apportion_kernel, 4, {**TABLES, "STEPS": 3, "BLOCK": 256}),
        (quota_routing.apportion_small_kernel, 4, small),
        (
            levelled_routing.route_levelled_kernel,
            4,
            {**TABLES, "GROUPED": True, "STEPS": 3, "BLOCK": 256},
        ),
        (table_commit.commit_kernel, 8, {**TABLES, "BLOCK": 1024}),
        (checksums.checksum_kernel, 4, {"ALIGNED": True, "BLOCK": 1024}),
        (checksums.checksum_kernel, 4, {"ALIGNED": False, "BLOCK": 1024}),
        *(solving(sizes) for sizes in (LARGE, *WIDE)),
        levelling(LARGE, wide=False),
        *(levelling(sizes, wide=True) for sizes in LEVELLED),
        levelling_of_counts(),
    ]


def source(kernel: Any, sizes: dict[str, Any]) -> Any:
    """The kernel with its arguments' types, all pointers on multiples of 16 bytes."""
    types, attributes = {}, {}
    for number, (name, parameter) in enumerate(kernel.signature.parameters.items()):
        types[name] = type_of(name, parameter.annotation)
        if types[name].startswith("*") or name == "stride":
            attributes[number,] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=types, constexprs=sizes, attrs=attributes)


def type_of(name: str, annotation: Any) -> str:
    if annotation is tl.constexpr:
        return "constexpr"
    if annotation is tl.int32:
        return "i32"
    if annotation is tl.int64:
        return "i64"
    if name == "data":
        return "*u8"
    return "*i64" if name in LONG else "*i32"


def compiled(kernel: Any, warps: int, sizes: dict[str, Any], target: int) -> Compiled:
    kernel_binary = triton.compile(
        source(kernel, sizes), target=GPUTarget("cuda", target, 32), options={"num_warps": warps}
    )
    return Compiled(
        kernel.__name__, target, stack_of(kernel_binary.asm["cubin"]), kernel_binary.asm["ptx"]
    )


def stack_of(binary: bytes) -> int:
    """Bytes of stack and local memory, as Triton's own tool reads them off the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    match = re.search(r"STACK:(\d+).*LOCAL:(\d+)", usage)
    assert match is not None, usage
    return int(match[1]) + int(match[2])


if __name__ == "__main__":
    targets = [int(word) for word in sys.argv[1:]]
    results = [compiled(*one, target) for target in targets for one in everything()]
    json.dump([asdict(result) for result in results], sys.stdout)
