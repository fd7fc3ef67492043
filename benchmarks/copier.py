"""The host copier beside one thread that copies: torch's copy_, and memcpy itself.

    python benchmarks/copier.py

A run is interleaved: every way copies the same bytes in turn, and a figure is the median of the
turns' ratios with their spread. Nothing else shares the memory here, so what a rate keeps free for
others is not seen; that the rate is kept, is.
"""

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from evidence import save
from torch import Tensor

from equipoise.balancer.experts import numa
from equipoise.balancer.experts.copy_profile import C2C, PCIE, PLAIN, Profile
from equipoise.balancer.experts.host_copier import Copy, HostCopier

TURNS = 7
WAIT = 60.0
MIB = 1 << 20
LOADS: dict[str, tuple[int, int]] = {
    "one expert of 24 MiB": (1, 24 * MIB),
    "eight experts of 24 MiB": (8, 24 * MIB),
    "200 small slots of 64 KiB": (200, MIB // 16),
}
"""Copies, and bytes of each."""


@dataclass(frozen=True)
class Way:
    """A way to copy everything, and for how long it took."""

    name: str
    copy: Callable[[list[Copy]], object]


def by_torch(copies: list[Copy]) -> None:
    """One thread of torch."""
    for copy in copies:
        copy.destination.copy_(copy.source)


def by_memcpy(copies: list[Copy]) -> None:
    """One thread of the C library."""
    for copy in copies:
        ctypes.memmove(copy.destination.data_ptr(), copy.source.data_ptr(), copy.source.nbytes)


def by_copier(copier: HostCopier) -> Callable[[list[Copy]], None]:
    """Ours, and wait."""
    return lambda copies: copier.submit(copies).wait(WAIT)


def seconds(way: Way, copies: list[Copy]) -> float:
    """Of one turn."""
    began = time.perf_counter()
    way.copy(copies)
    return time.perf_counter() - began


def material(count: int, nbytes: int) -> list[Copy]:
    """Other bytes for every copy, and pages that were touched."""

    def noise(seed: int) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random)

    return [Copy(noise(n), torch.zeros(nbytes, dtype=torch.uint8)) for n in range(count)]


def contest(ways: list[Way], copies: list[Copy]) -> dict[str, dict[str, float]]:
    """By way: GB a second, and how many times faster than memcpy in the same turn."""
    turns = [{way.name: seconds(way, copies) for way in ways} for _ in range(TURNS + 1)][1:]
    total = sum(copy.source.nbytes for copy in copies)
    figures = {}
    for way in ways:
        ratios = [turn["memcpy"] / turn[way.name] for turn in turns]
        figures[way.name] = {
            "gigabytes_per_second": round(
                total / 1e9 / statistics.median(turn[way.name] for turn in turns), 3
            ),
            "times_memcpy": round(statistics.median(ratios), 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
        }
    if not all(torch.equal(copy.source, copy.destination) for copy in copies):
        raise RuntimeError("a copy differs from its source")
    return figures


def main() -> None:
    """Print the table and keep the figures."""
    torch.set_num_threads(1)
    most = len(numa.available_cpus())
    slow = Profile("2 GB/s", PCIE.chunk_bytes, 2e9)
    copiers = [HostCopier(PLAIN, threads) for threads in sorted({1, most})]
    copiers += [HostCopier(profile, most) for profile in (PCIE, C2C, slow)]
    ways = [Way("memcpy", by_memcpy), Way("torch copy_", by_torch)]
    ways += [Way(f"{c.profile.name}, {c.threads} threads", by_copier(c)) for c in copiers]
    found = {}
    print(f"{'copies':<28}{'way':<20}{'GB/s':>8}{'of memcpy':>11}{'spread':>18}")
    for load, shape in LOADS.items():
        found[load] = contest(ways, material(*shape))
        for name, row in found[load].items():
            spread = f"{row['lowest']:.2f} .. {row['highest']:.2f}"
            figures = f"{row['gigabytes_per_second']:>8.2f}{row['times_memcpy']:>11.2f}"
            print(f"{load:<28}{name:<20}{figures}{spread:>18}")
    for copier in copiers:
        copier.close(WAIT)
    save("copier", ["python", "benchmarks/copier.py"], found)


if __name__ == "__main__":
    main()
