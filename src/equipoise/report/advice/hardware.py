"""A roofline of expert layers: rates and memory of a device, size and work of an expert.

An expert layer takes as long as its slowest rank, at the peak rates of the hardware.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np
import yaml

from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.statistics import ExpertStatistics
from equipoise.hal.errors import FormatError
from equipoise.input_files import read_input
from equipoise.report.placement.spread import Reals, layout_rows, replica_shares

PRECISIONS: Mapping[str, int] = {"bf16": 16, "fp8": 8, "fp4": 4}
"""Bits of a weight."""
LINKS = "node", "network", "host"
RATES = tuple(f"{precision}_tflops" for precision in PRECISIONS)
KEYS = "memory_gb", "memory_bandwidth_gbs", *RATES, *(f"{link}_link_gbs" for link in LINKS)
MOST = 1e9


@dataclass(frozen=True)
class Hardware:
    """One device. What is not known is not there.

    Attributes:
        name: for people.
        figures: by key: `memory_gb` in 10^9 bytes, `memory_bandwidth_gbs` and `*_link_gbs` in 10^9
            bytes a second (links in one direction), `*_tflops` in 10^12 operations a second, dense.
        sources: of each figure, for people.
    """

    name: str
    figures: Mapping[str, float]
    sources: Mapping[str, str] = field(default_factory=dict)

    def figure(self, key: str) -> float:
        """Raises `FormatError` that names the hardware where it is not known."""
        if key not in self.figures:
            raise FormatError(self.name, f"has no {key}; it has {', '.join(self.figures)}")
        return self.figures[key]

    @property
    def memory_bytes(self) -> int:
        """Of one device."""
        return int(self.figure("memory_gb") * 1e9)

    @property
    def bytes_per_second(self) -> float:
        """That a device reads from its own memory."""
        return self.figure("memory_bandwidth_gbs") * 1e9

    def operations_per_second(self, precision: str) -> float:
        """Of matrix products, dense."""
        key = f"{precision}_tflops"
        known = " or ".join(one for one in PRECISIONS if f"{one}_tflops" in self.figures)
        if key not in self.figures and known:
            raise FormatError(self.name, f"has no {key}: --precision {known} has a figure")
        return self.figure(key) * 1e12

    def link_bytes_per_second(self, link: str) -> float:
        """That a device receives over a link."""
        return self.figure(f"{link}_link_gbs") * 1e9

    def ridge(self, precision: str) -> float:
        """Rows of one expert from which on it is computing, not reading weights, that takes time.

        Each weight is 2 operations a row, and its bits are read once.
        """
        size = PRECISIONS[precision] / 8
        return self.operations_per_second(precision) * size / (2 * self.bytes_per_second)


@lru_cache(maxsize=1)
def shipped_hardware() -> Mapping[str, Hardware]:
    """The table that ships with the package."""
    text = resources.files("equipoise.report.advice").joinpath("hardware.yaml").read_text("utf-8")
    return {name: _hardware(name, items) for name, items in yaml.safe_load(text).items()}


def find_hardware(name: str) -> Hardware:
    """A device of the table, or of a file: YAML or JSON with the keys of `KEYS`, and `name`.

    Raises `FormatError`.
    """
    if name in shipped_hardware():
        return shipped_hardware()[name]
    path = Path(name)
    if not path.exists():
        raise FormatError(name, f"is neither a file nor one of {', '.join(shipped_hardware())}")
    try:
        items = yaml.safe_load(read_input(path).decode())
    except (yaml.YAMLError, ValueError, RecursionError):
        raise FormatError(name, "is neither YAML nor JSON") from None
    except OSError as error:
        raise FormatError(name, f"cannot be read: {error.strerror}") from None
    if not isinstance(items, dict) or not items:
        raise FormatError(name, f"is not a mapping of figures: {', '.join(KEYS)}")
    title = items.pop("name", path.stem)
    return _hardware(str(title), items, name)


def _hardware(name: str, items: Mapping[object, object], where: str = "") -> Hardware:
    figures, sources = {}, {}
    for key, item in items.items():
        if key not in KEYS:
            raise FormatError(where or name, f"unknown key {key!r}; known: name, {', '.join(KEYS)}")
        value, source = _value_and_source(item)
        # In YAML `true` is a bool, which Python counts as an int. So written, nan is refused too.
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not (isinstance(value, int | float) and numeric and 0 < value <= MOST):
            problem = f"{key} must be a positive number to {MOST:g}, got {value!r}"
            raise FormatError(where or name, problem)
        figures[str(key)], sources[str(key)] = float(value), source or where
    return Hardware(name, figures, sources)


def _value_and_source(item: object) -> tuple[object, str]:
    if isinstance(item, dict):
        return item.get("value", math.nan), str(item.get("source", ""))
    return item, ""


MATRICES = 3
"""Of an expert with a gate: up, gate and down."""


@dataclass(frozen=True)
class Expert:
    """Weights of one expert in one layer, scales left out.

    Attributes:
        size: bytes.
        precision: of the weights, a key of `PRECISIONS`.
    """

    size: int
    precision: str

    @classmethod
    def of_dimensions(cls, hidden: int, intermediate: int, precision: str) -> "Expert":
        """Three matrices of hidden x intermediate."""
        bits = MATRICES * hidden * intermediate * PRECISIONS[precision]
        return cls(-(-bits // 8), precision)

    @property
    def operations_per_row(self) -> int:
        """A multiplication and an addition for each weight."""
        return 2 * self.size * 8 // PRECISIONS[self.precision]


@dataclass(frozen=True)
class Roofline:
    """The roofline model (Williams, Waterman and Patterson, 2009) of a rank's experts.

    A rank takes the longer of two times: to read the weights of its active experts once, and to
    compute its rows. A slot with r rows a step in the mean is active with probability 1 - exp(-r).
    Activations, launches and the exchange are left out: no real layer is faster.
    """

    expert: Expert
    hardware: Hardware

    def seconds(self, rows: Reals, ranks: int) -> Reals:
        """(windows, ranks) from rows of slots in a step, (windows, slots)."""
        by_rank = rows.reshape(len(rows), ranks, -1)
        active = -np.expm1(-by_rank).sum(axis=2)
        reading = active * self.expert.size / self.hardware.bytes_per_second
        rate = self.hardware.operations_per_second(self.expert.precision)
        computing = by_rank.sum(axis=2) * self.expert.operations_per_row / rate
        longer: Reals = np.maximum(reading, computing)
        return longer

    def layers(self, statistics: ExpertStatistics, layout: ExpertPlacement, scale: float) -> Reals:
        """(layers,): seconds of the slowest rank, mean over windows.

        `scale` is the rows of a step over those of a window.
        """
        part = replica_shares(layout)
        layer_times = []
        for place, row in enumerate(layout_rows(statistics, layout)):
            rows = statistics.counts[:, place, layout.placement[row]] * part[row] * scale
            layer_times.append(float(self.seconds(rows, layout.ranks).max(axis=1).mean()))
        return np.array(layer_times)
