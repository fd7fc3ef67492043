"""What docs/performance.md says about the host copier, from copier.json."""

from collections.abc import Callable
from typing import Any

Figures = dict[str, Any]
BASE = "memcpy"
SLOWER = 1.0
"""Times memcpy of the same turn below which a way is slower than one thread of the C library."""


def text(figures: Figures) -> list[str]:
    """Everything of the file: a table by load and way, and where the copier is the slower one."""
    lines = [
        "The copier of the locked path beside one thread that copies the same bytes in the same "
        "turn. Ratios are medians over turns (least to most); memory rates are of this machine. "
        "`plain` takes what it gets; `pcie` and `c2c` keep to a rate which no memory here reaches; "
        "*2 GB/s* shows that a rate is kept. No bar: nothing else shares the memory here.",
        "",
        "| Copies | Way | GB per second | Times one memcpy |",
        "|---|---|---|---|",
    ]
    for load, ways in figures.items():
        lines += [_row(load, way, found) for way, found in ways.items()]
    return [*lines, "", *_verdict(figures)]


def _row(load: str, way: str, found: Figures) -> str:
    spread = f"({found['lowest']:.2f} to {found['highest']:.2f})"
    times = "1" if way == BASE else f"{found['times_memcpy']:.2f} {spread}"
    return f"| {load} | {way} | {found['gigabytes_per_second']:.2f} | {times} |"


def _verdict(figures: Figures) -> list[str]:
    """Where `plain` with most threads is below one memcpy, in so many words."""
    told = []
    for load, ways in figures.items():
        plain = [way for way in ways if way.startswith("plain")]
        times = ways[plain[-1]]["times_memcpy"]
        word = "slower" if times < SLOWER else "no slower"
        told.append(f"{load}, {word} ({times:.2f})")
    return [f"`plain` with all threads beside one memcpy: {'; '.join(told)}.", ""]


PARTS: dict[str, tuple[str, Callable[[Figures], list[str]]]] = {"The host copier": ("copier", text)}
"""By title: the file of figures, and what is said of them."""
