"""Times of the small kernels, beside how others route and count, and beside plain torch code.

Each is captured in a graph of many launches, where there are graphs, so that the host costs
nothing; what is told is one launch, with the gap that a graph leaves between two. All launches of a
graph read and write the same tensors: they are in the device's cache, as they are within a model
whose tables every layer reads.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from cuda_clock import MICRO, Clock, in_turns, paired, repeated, scaled, spread
from cuda_optimum import optimum
from cuda_place import Place
from cuda_routing import SALT, TOP_K, Case, gap
from torch import Tensor

from equipoise.balancer.experts.change import change_of
from equipoise.hal.kernels import Kernels
from equipoise.hal.stream import Role, Stream

OURS, THEIRS, PLAIN = "ours", "hash and count", "torch"
Figures = dict[str, Any]
Call = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """How large and how often.

    Attributes:
        tokens: of the batches that are routed.
        others: of those that the other kernels are given.
        launches: in a graph.
        rounds: in which all contestants are timed in turn.
        layers: of the tables.
        checked: bytes of what is summed.
    """

    tokens: tuple[int, ...]
    others: tuple[int, ...]
    launches: int
    rounds: int
    layers: int
    checked: tuple[int, ...]


FULL = Sizes(tuple(1 << power for power in range(15)), (64, 4096, 16384), 200, 7, 58,
             (1 << 26, 1 << 30))  # fmt: skip
TRIAL = Sizes((1, 64), (16,), 3, 2, 2, (1 << 16,))


@dataclass(frozen=True)
class Batch:
    """Tokens of a size, and room for what is made of them."""

    ids: Tensor
    slots: Tensor
    counts: Tensor
    load: Tensor
    rows: Tensor

    @staticmethod
    def of(case: Case, tokens: int) -> "Batch":
        """Zeroed."""
        ids, shape = case.ids(tokens), case.shape
        zeros = [np.zeros(n, dtype=np.int32) for n in (ids.numel(), shape.experts, shape.slots)]
        rows = case.on_device(np.array([tokens], dtype=np.int32))
        return Batch(ids, *(case.on_device(array) for array in zeros), rows)


@dataclass(frozen=True)
class Bench:
    """What everything here is measured with."""

    case: Case
    sizes: Sizes

    @property
    def place(self) -> Place:
        """Where."""
        return self.case.place

    @property
    def kernels(self) -> Kernels:
        """Ours."""
        return self.place.accelerator.kernels

    @property
    def stream(self) -> Stream:
        """That all is launched on."""
        return self.place.accelerator.stream(Role.COMPUTE)

    @property
    def clock(self) -> Clock:
        """Of that stream."""
        return self.place.clock(Role.COMPUTE)

    def timed(self, call: Call) -> Callable[[], float]:
        """Seconds of a launch, captured where there are graphs."""
        self.place.settle()  # what it reads may have been made on another stream
        return repeated(self.clock, call, self.sizes.launches, self.place.graph())


def baseline() -> ModuleType | None:
    """How others do it, in our words; None where that is not at hand."""
    try:
        return import_module("cuda_baseline")
    except ImportError:
        return None


def measured(place: Place, sizes: Sizes) -> Figures:
    """Everything about kernels but what is checked against another engine."""
    bench = Bench(Case.of(place, sizes.layers), sizes)
    return {
        "launches": sizes.launches if place.graph() is not None else 0,
        "rounds": sizes.rounds,
        "routing": [routing(bench, tokens) for tokens in sizes.tokens],
        "others": [*others(bench), commits(bench), *sums(bench)],
        "shares": shares(bench),
    }


def routing(bench: Bench, tokens: int) -> Figures:
    """One size: all contestants, and ours beside them."""
    batch = Batch.of(bench.case, tokens)
    timed = {name: bench.timed(call) for name, call in contestants(bench, batch)}
    found = in_turns(timed, bench.sizes.rounds)
    row: Figures = {"tokens": tokens, "microseconds": _micro(found)}
    if THEIRS in found:
        row["ratio"] = paired(found[OURS], found[THEIRS])
        row["above"] = scaled(
            (own - other for own, other in zip(found[OURS], found[THEIRS], strict=True)), MICRO
        )
    return row


def contestants(bench: Bench, batch: Batch) -> Iterator[tuple[str, Call]]:
    """Who routes and counts a batch; a kernel written for a device only where there is one."""
    case, stream = bench.case, bench.stream
    tables, others = case.tables, baseline()

    def ours() -> None:
        bench.kernels.route_and_count(batch.ids, tables, SALT, batch.slots, batch.counts, stream)

    yield OURS, ours
    if others is None:
        return
    theirs = [(PLAIN, others.torch_hash_and_count)]
    if bench.place.on_device:
        theirs.append((THEIRS, others.hash_and_count))
    for name, function in theirs:
        yield name, launched(stream, function, baseline_arguments(case, batch))


def baseline_arguments(case: Case, batch: Batch) -> tuple[Any, ...]:
    """In the order in which both baselines take them."""
    replicas = case.replicas
    return (batch.ids, replicas.slots, replicas.copies, batch.load, batch.rows, TOP_K, batch.slots)


def launched(stream: Stream, function: Callable[..., object], arguments: tuple[Any, ...]) -> Call:
    """A call that launches a function on a stream."""
    return lambda: stream.launch(lambda: function(*arguments))


def others(bench: Bench) -> Iterator[Figures]:
    """Quotas of a batch, and counts alone."""
    tables, kernels, stream = bench.case.tables, bench.kernels, bench.stream
    cumulative = tables.cumulative[int(tables.generation[0]) & 1, 0].clone()
    for tokens in bench.sizes.others:
        batch = Batch.of(bench.case, tokens)

        def apportioned(batch: Batch = batch) -> None:
            kernels.route_apportioned(
                batch.ids, tables, cumulative, SALT, batch.slots, batch.counts, stream
            )

        def count(batch: Batch = batch) -> None:
            kernels.count(batch.ids, batch.counts, stream)

        timed = {"route_apportioned": bench.timed(apportioned), "count": bench.timed(count)}
        for name, times in in_turns(timed, bench.sizes.rounds).items():
            yield {"what": name, "of": f"{tokens:,} tokens", "microseconds": scaled(times, MICRO)}


def commits(bench: Bench) -> Figures:
    """New tables of all layers at once; launched, since the host's memory that they come from is
    another each time."""
    case = bench.case
    change = change_of(case.layout, case.shape, range(case.shape.layers))

    def commit() -> None:
        bench.kernels.commit_tables(change.update, case.tables, bench.stream)

    timed = repeated(bench.clock, commit, min(bench.sizes.launches, 20), None)
    times = in_turns({"": timed}, bench.sizes.rounds)[""]
    of = f"{case.shape.layers} layers, launched"
    return {"what": "commit_tables", "of": of, "microseconds": scaled(times, MICRO)}


def sums(bench: Bench) -> Iterator[Figures]:
    """Checksums: of what the cache holds, and of what it does not."""
    device = bench.place.accelerator.device
    out = torch.zeros(1, dtype=torch.int64).to(device)
    for size in bench.sizes.checked:
        data = torch.zeros(size, dtype=torch.uint8).to(device)

        def sum_up(data: Tensor = data) -> None:
            bench.kernels.checksum(data, out, bench.stream)

        bench.place.settle()
        few = max(1, min(bench.sizes.launches, (1 << 32) // size))
        timed = repeated(bench.clock, sum_up, few, bench.place.graph())
        times = in_turns({"": timed}, bench.sizes.rounds)[""]
        yield {
            "what": "checksum",
            "of": f"{size / 2**20:g} MiB",
            "microseconds": scaled(times, MICRO),
            "gigabytes_per_second": scaled((1.0 / seconds for seconds in times), size / 1e9),
        }


def shares(bench: Bench) -> Figures:
    """Exact shares: time of a layer, over all layers in turn, and how far from the optimum."""
    case, layers = bench.case, bench.case.shape.layers
    counts = case.on_device(case.loads)
    solved = torch.zeros((layers, case.shape.slots), dtype=torch.int32).to(counts.device)

    def solve() -> None:
        for layer in range(layers):
            bench.kernels.solve_shares(
                counts[layer], case.tables, layer, solved[layer], bench.stream
            )

    timed = repeated(bench.clock, solve, 1, bench.place.graph())
    times = [seconds / layers for seconds in in_turns({"": timed}, bench.sizes.rounds)[""]]
    found = solved.cpu().numpy().astype(np.int64)
    gaps = [
        gap(case.loads, case.tables, layer, found[layer])
        - optimum(case.loads[layer], case.layout.placement[layer], case.shape.ranks)
        for layer in range(layers)
    ]
    return {"layers": layers, "microseconds": scaled(times, MICRO), "gap": spread(gaps)}


def _micro(found: dict[str, list[float]]) -> dict[str, Any]:
    return {name: scaled(times, MICRO) for name, times in found.items()}
