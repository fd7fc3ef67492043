"""Every kernel compiles without a device, and its code is in order; in deep three generations."""

import json
import os
import re
import subprocess
import sys

import pytest
from helpers.tiers import DEEP

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.slow

TARGETS = ("80", "90", "100") if DEEP else ("90",)
KERNELS = 23
TICKETS = {
    "count_kernel",
    "hash_kernel",
    "row_hash_kernel",
    "block_turns_kernel",
    "apportion_small_kernel",
    "checksum_kernel",
}
"""Kernels whose last program finishes."""
BARRIER = "bar.sync"
STORE = r"st\.global"
ADDITION = r"(red|atom)\.global\.gpu\.relaxed\.add"
TICKET = r"atom\.global\.gpu\.acq_rel\.add"
EXCHANGE = r"atom\.global\.gpu\.relaxed\.exch"
WORD = r"atom\.global\.gpu\.release\.exch"
Kernels = list[dict[str, object]]


@pytest.fixture(scope="module")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """All of them, compiled in one process, in which kernels are not interpreted."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    result = subprocess.run(
        [sys.executable, "-m", "helpers.harnesses.kernel_compiling", *TARGETS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    kernels: Kernels = json.loads(result.stdout)
    return kernels


def lines_with(code: str, pattern: str) -> list[int]:
    return [number for number, line in enumerate(code.splitlines()) if re.search(pattern, line)]


def barrier_between(code: str, first: list[int], second: list[int]) -> bool:
    """Whether all of the first come before all of the second, and a barrier between them."""
    if not first or not second:
        return False
    return any(max(first) < line < min(second) for line in lines_with(code, BARRIER))


def ticket_is_in_order(code: str) -> bool:
    """Additions, a barrier, the ticket with its fence, a barrier, the exchange."""
    additions, tickets, exchanges = (
        lines_with(code, pattern) for pattern in (ADDITION, TICKET, EXCHANGE)
    )
    return barrier_between(code, additions, tickets) and barrier_between(code, tickets, exchanges)


def word_is_last(code: str) -> bool:
    """All stores, a barrier, the word with its fence."""
    return barrier_between(code, lines_with(code, STORE), lines_with(code, WORD))


def code_of(kernels: Kernels, name: str, target: int = 90) -> str:
    """Of a kernel whose programs are several; one that is alone has no ticket."""
    codes = [str(one["ptx"]) for one in kernels if (one["name"], one["target"]) == (name, target)]
    return max(codes, key=lambda code: len(lines_with(code, TICKET)))


def test_kernels_compile_for_every_target(compiled_kernels: Kernels) -> None:
    assert len(compiled_kernels) == len(TARGETS) * KERNELS


def test_kernels_spill_no_registers(compiled_kernels: Kernels) -> None:
    assert [(one["name"], one["target"]) for one in compiled_kernels if one["stack"] != 0] == []


@pytest.mark.parametrize("target", TARGETS)
def test_levelling_on_32_ranks_gathers_by_shuffles(compiled_kernels: Kernels, target: str) -> None:
    """Six gathers a turn, each of four shuffles, in both loops; else a turn has 12 barriers."""
    code = code_of(compiled_kernels, "level_small_kernel", int(target))
    assert len(lines_with(code, r"shfl\.sync\.idx")) >= 2 * 6 * 4


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", sorted(TICKETS))
def test_kernel_ptx_orders_additions_ticket_and_exchange(
    compiled_kernels: Kernels, name: str, target: str
) -> None:
    assert ticket_is_in_order(code_of(compiled_kernels, name, int(target)))


@pytest.mark.parametrize("target", TARGETS)
def test_commit_kernel_ptx_writes_generation_last(compiled_kernels: Kernels, target: str) -> None:
    assert word_is_last(code_of(compiled_kernels, "commit_kernel", int(target)))


@pytest.mark.parametrize(
    ("text", "by"), [(BARRIER, "//"), ("acq_rel", "relaxed"), ("relaxed.exch", "ld")]
)
def test_ptx_check_detects_misordered_ticket(compiled_kernels: Kernels, text: str, by: str) -> None:
    assert not ticket_is_in_order(code_of(compiled_kernels, "hash_kernel").replace(text, by))


def test_ptx_check_detects_early_generation_write(compiled_kernels: Kernels) -> None:
    code = code_of(compiled_kernels, "commit_kernel")
    lines = code.splitlines()
    word = lines.pop(lines_with(code, WORD)[0])
    early = [*lines[: lines_with("\n".join(lines), STORE)[-1]], word]
    rest = lines[len(early) - 1 :]
    assert not word_is_last("\n".join([*early, *rest]))
    assert not word_is_last(code.replace("release", "relaxed"))
    assert not word_is_last(code.replace(BARRIER, "//"))
