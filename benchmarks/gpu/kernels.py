"""Times of the small kernels, beside how others route and count, and beside plain torch code.

Each is captured in a graph of many launches, where there are graphs, so that the host costs
nothing; what is told is one launch, with the gap that a graph leaves between two. All launches of a
graph read and write the same tensors: they are in the device's cache, as they are within a model
whose tables every layer reads.

The optimum that exact shares are compared with is found by a flow of our own, in integers. A peak
is reached exactly when every row finds a rank: when the largest flow from experts through ranks,
each of which lets the peak pass, carries all rows. Where it does not, the experts on the near side
of the least cut hold too many rows for the ranks that they have: the peak is at least their rows
over these ranks, which is the next peak to try. The first one that holds is the optimum
(Dinkelbach's way with a ratio). scipy's linear program says the same; it is not wanted on the
machine that has a device.

Our re-write of another engine's kernel is held against the kernel itself where that is installed.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lib.loads import Counts, Model, Odds, batches, windows
from lib.results import spread
from torch import Tensor

from equipoise.balancer.experts import plan
from equipoise.balancer.experts.placement import ExpertShape, Layout
from equipoise.balancer.experts.routing.layer_update import layer_update
from equipoise.hal.kernels import Kernels, Salt, Tables
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.stream import Role, Stream
from gpu.stopwatch import MICRO, Clock, Place, in_turns, paired, repeated, scaled

ExpertRanks = list[set[int]]
"""By expert, the ranks that hold it."""


def optimum(load: npt.NDArray[np.int64], placement: npt.NDArray[np.int32], ranks: int) -> float:
    """The lowest max/mean - 1 over ranks, for one layer.

    Args:
        load: (experts,), rows.
        placement: (slots,), the expert in each slot; slots are spread over ranks in order.
        ranks: how many; 0 is the answer where there are no rows.
    """
    rows = [int(count) for count in load]
    total = sum(rows)
    if total == 0:
        return 0.0
    expert_ranks: ExpertRanks = [set() for _ in rows]
    for slot, expert in enumerate(placement.tolist()):
        expert_ranks[expert].add(slot * ranks // len(placement))
    peak = Fraction(total, ranks)
    while (crowded := _crowded(rows, expert_ranks, ranks, peak)) is not None:
        peak = crowded
    return float(peak * ranks / total) - 1.0


def _crowded(
    rows: list[int], expert_ranks: ExpertRanks, ranks: int, peak: Fraction
) -> Fraction | None:
    """The peak that some experts need by themselves, above `peak`; None where none do."""
    demand = [count * peak.denominator for count in rows]
    flow: list[dict[int, int]] = [{} for _ in range(ranks)]
    room = [peak.numerator] * ranks
    remaining = _filled(demand, expert_ranks, flow, room)
    experts = _reached(remaining, expert_ranks, flow, room)[0]
    if not any(remaining[expert] for expert in experts):
        return None
    places = set().union(*(expert_ranks[expert] for expert in experts))
    return Fraction(sum(rows[expert] for expert in experts), len(places))


def _filled(
    demand: list[int], expert_ranks: ExpertRanks, flow: list[dict[int, int]], room: list[int]
) -> list[int]:
    """Send as much as there is room for; what is left of each expert. `flow` and `room` change."""
    remaining = list(demand)
    for expert, places in enumerate(expert_ranks):
        for rank in places:
            _send(expert, rank, min(remaining[expert], room[rank]), remaining, flow, room)
    while (path := _path(remaining, expert_ranks, flow, room)) is not None:
        _push(path, remaining, flow, room)
    return remaining


def _send(
    expert: int,
    rank: int,
    size: int,
    remaining: list[int],
    flow: list[dict[int, int]],
    room: list[int],
) -> None:
    if size > 0:
        remaining[expert] -= size
        room[rank] -= size
        flow[rank][expert] = flow[rank].get(expert, 0) + size


Came = dict[int, tuple[int, int]]
"""By rank, how it was come to: from which rank, -1 from the beginning, by moving which expert."""


def _reached(
    remaining: list[int], expert_ranks: ExpertRanks, flow: list[dict[int, int]], room: list[int]
) -> tuple[set[int], Came, int | None]:
    """Experts that rows left over lead to, how ranks were come to, and one of these with room."""
    experts = {expert for expert, rows_left in enumerate(remaining) if rows_left}
    came: Came = {}
    queue = deque((-1, expert) for expert in sorted(experts))
    while queue:
        origin, expert = queue.popleft()
        for rank in sorted(expert_ranks[expert]):
            if rank in came or rank == origin:
                continue
            came[rank] = origin, expert
            if room[rank] > 0:
                return experts, came, rank
            for other, size in flow[rank].items():
                if size > 0 and other not in experts:
                    experts.add(other)
                    queue.append((rank, other))
    return experts, came, None


def _path(
    remaining: list[int], expert_ranks: ExpertRanks, flow: list[dict[int, int]], room: list[int]
) -> list[tuple[int, int, int]] | None:
    """Moves (expert, from rank, to rank) that make room, the last one first; None: no room."""
    _, came, end = _reached(remaining, expert_ranks, flow, room)
    if end is None:
        return None
    moves = []
    while end != -1:
        origin, expert = came[end]
        moves.append((expert, origin, end))
        end = origin
    return moves


def _push(
    moves: list[tuple[int, int, int]],
    remaining: list[int],
    flow: list[dict[int, int]],
    room: list[int],
) -> None:
    """As much as fits along a path."""
    first_expert = moves[-1][0]
    inner = [flow[origin][expert] for expert, origin, _ in moves if origin != -1]
    size = min(remaining[first_expert], room[moves[0][2]], *inner)
    remaining[first_expert] -= size
    room[moves[0][2]] -= size
    for expert, origin, rank in moves:
        flow[rank][expert] = flow[rank].get(expert, 0) + size
        if origin != -1:
            flow[origin][expert] -= size


SEED = 20
SALT = Salt(rank=3, layer=0, step=17)
TOP_K = 8
NOBODY = -1
"""In the place of a replica that there is not."""


@dataclass(frozen=True)
class Replicas:
    """The same placement as others keep it.

    Attributes:
        slots: int32 [experts, most], the slots of each expert; -1 behind the last.
        copies: int32 [experts], how many there are.
    """

    slots: Tensor
    copies: Tensor


@dataclass(frozen=True)
class Case:
    """A model's tables on the device, committed.

    Attributes:
        place: where.
        shape: how many of everything.
        model: of the load.
    """

    place: Place
    shape: ExpertShape
    model: Model

    @staticmethod
    def of(place: Place, layers: int) -> "Case":
        """Of 256 experts, 288 slots and 32 ranks."""
        model = Model(layers=layers)
        return Case(place, ExpertShape(layers, model.experts, 288, model.ranks), model)

    @cached_property
    def odds(self) -> Odds:
        """(layers, experts), how often each expert is chosen."""
        return next(windows(self.model, SEED, 1)).odds

    @cached_property
    def loads(self) -> Counts:
        """(layers, experts), rows of a batch that the tables were not planned for."""
        return next(batches(self.model, self.odds, SEED, 1))

    @cached_property
    def layout(self) -> Layout:
        """The connected placement, with the shares that are best for the window."""
        (window,) = windows(self.model, SEED, 1)
        new_plan = plan(
            window.load, slots=self.shape.slots, ranks=self.shape.ranks, policy="connected"
        )
        return Layout(new_plan.placement, new_plan.shares)

    @cached_property
    def tables(self) -> Tables:
        """All layers', in force."""
        accelerator = self.place.accelerator
        shape = self.shape
        tables = Tables.empty(
            shape.layers, shape.experts, shape.slots, shape.ranks, accelerator.device
        )
        change = layer_update(self.layout, shape, range(shape.layers))
        accelerator.kernels.commit_tables(change.tables, tables, accelerator.stream(Role.COMPUTE))
        self.place.settle()
        return tables

    @cached_property
    def replicas(self) -> Replicas:
        """Layer 0."""
        row, experts = self.layout.placement[0], self.shape.experts
        copies = np.bincount(row, minlength=experts)
        slots = np.full((experts, int(copies.max())), NOBODY, dtype=np.int32)
        for expert in range(experts):
            slot_ids = np.flatnonzero(row == expert)
            slots[expert, : len(slot_ids)] = slot_ids
        return Replicas(self.on_device(slots), self.on_device(copies.astype(np.int32)))

    def ids(self, tokens: int) -> Tensor:
        """int32 [tokens * top_k]: for each token as many different experts, by their odds."""
        return self.on_device(draw_experts(self.odds[0], tokens, TOP_K, SEED).reshape(-1))

    def on_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        """A copy of it."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.place.accelerator.device)


def draw_experts(
    odds: npt.NDArray[np.float64], tokens: int, top_k: int, seed: int
) -> npt.NDArray[np.int32]:
    """(tokens, top_k): drawn without repeats (Gumbel's way), in the order of their scores."""
    noise = np.random.default_rng(seed).gumbel(size=(tokens, len(odds)))
    scores = np.log(odds) + noise
    top = np.argsort(-scores, axis=1)[:, :top_k]
    return top.astype(np.int32)


def gap(loads: Counts, tables: Tables, layer: int, cumulative: npt.NDArray[np.int64]) -> float:
    """The imbalance (max/mean - 1) that these shares make of a layer's load."""
    start = tables.start[int(tables.generation[layer]) & 1, layer].cpu().numpy()
    replicas = tables.replicas[int(tables.generation[layer]) & 1, layer].cpu().numpy()
    shares = np.diff(cumulative, prepend=0)
    first_replicas = start[:-1][np.diff(start) > 0]
    shares[first_replicas] = cumulative[first_replicas]
    experts = np.repeat(np.arange(len(start) - 1), np.diff(start))
    rows = np.bincount(
        replicas * tables.ranks // tables.slots,
        weights=loads[layer, experts] * shares / (1 << 16),
        minlength=tables.ranks,
    )
    return float(rows.max() / rows.mean() - 1.0)


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
    other_tokens: tuple[int, ...]
    launches: int
    rounds: int
    layers: int
    checksum_bytes: tuple[int, ...]


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

    def timer(self, call: Call) -> Callable[[], float]:
        """Seconds of a launch, captured where there are graphs."""
        self.place.settle()  # what it reads may have been made on another stream
        return repeated(self.clock, call, self.sizes.launches, self.place.graph())


def baseline() -> ModuleType | None:
    """How others do it, in our words; None where that is not at hand."""
    try:
        return import_module("gpu.baseline")
    except ImportError:
        return None


def measure(place: Place, sizes: Sizes) -> Figures:
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
    timers = {name: bench.timer(call) for name, call in contestants(bench, batch)}
    times = in_turns(timers, bench.sizes.rounds)
    row: Figures = {"tokens": tokens, "microseconds": _micro(times)}
    if THEIRS in times:
        row["ratio"] = paired(times[OURS], times[THEIRS])
        row["above"] = scaled(
            (own - other for own, other in zip(times[OURS], times[THEIRS], strict=True)), MICRO
        )
    return row


def contestants(bench: Bench, batch: Batch) -> Iterator[tuple[str, Call]]:
    """Who routes and counts a batch; a kernel written for a device only where there is one."""
    case, stream = bench.case, bench.stream
    tables, rivals = case.tables, baseline()

    def ours() -> None:
        bench.kernels.route_and_count(batch.ids, tables, SALT, batch.slots, batch.counts, stream)

    yield OURS, ours
    if rivals is None:
        return
    theirs = [(PLAIN, rivals.torch_hash_and_count)]
    if bench.place.on_device:
        theirs.append((THEIRS, rivals.hash_and_count))
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
    """Quotas of a batch, levelled batches beside hashed ones, and counts alone."""
    tables, kernels, stream = bench.case.tables, bench.kernels, bench.stream
    cumulative = tables.cumulative[int(tables.generation[0]) & 1, 0].clone()
    for tokens in bench.sizes.other_tokens:
        batch = Batch.of(bench.case, tokens)

        def apportioned(batch: Batch = batch) -> None:
            kernels.route_apportioned(
                batch.ids, tables, cumulative, SALT, batch.slots, batch.counts, stream
            )

        def levelled(batch: Batch = batch) -> None:
            kernels.route_levelled(batch.ids, tables, SALT, None, batch.slots, batch.counts, stream)

        # Of two ranks with the same rows.
        rows = torch.bincount(batch.ids, minlength=tables.experts).int()
        group = GroupCounts(rows * 2, rows)

        def grouped(batch: Batch = batch, group: GroupCounts = group) -> None:
            kernels.route_levelled(
                batch.ids, tables, SALT, group, batch.slots, batch.counts, stream
            )

        def hashed(batch: Batch = batch) -> None:
            kernels.route_and_count(batch.ids, tables, SALT, batch.slots, batch.counts, stream)

        def count(batch: Batch = batch) -> None:
            kernels.count(batch.ids, batch.counts, stream)

        timers = {
            "route_apportioned": bench.timer(apportioned),
            "route_levelled": bench.timer(levelled),
            "route_levelled of a group": bench.timer(grouped),
            "route_and_count": bench.timer(hashed),
            "count": bench.timer(count),
        }
        for name, times in in_turns(timers, bench.sizes.rounds).items():
            yield {"what": name, "of": f"{tokens:,} tokens", "microseconds": scaled(times, MICRO)}


def commits(bench: Bench) -> Figures:
    """New tables of all layers at once; launched, since the host's memory that they come from is
    another each time."""
    case = bench.case
    change = layer_update(case.layout, case.shape, range(case.shape.layers))

    def commit() -> None:
        bench.kernels.commit_tables(change.tables, case.tables, bench.stream)

    timer = repeated(bench.clock, commit, min(bench.sizes.launches, 20), None)
    times = in_turns({"": timer}, bench.sizes.rounds)[""]
    of = f"{case.shape.layers} layers, launched"
    return {"what": "commit_tables", "of": of, "microseconds": scaled(times, MICRO)}


def sums(bench: Bench) -> Iterator[Figures]:
    """Checksums: of what the cache holds, and of what it does not."""
    device = bench.place.accelerator.device
    out = torch.zeros(1, dtype=torch.int64).to(device)
    for size in bench.sizes.checksum_bytes:
        data = torch.zeros(size, dtype=torch.uint8).to(device)

        def sum_up(data: Tensor = data) -> None:
            bench.kernels.checksum(data, out, bench.stream)

        bench.place.settle()
        few = max(1, min(bench.sizes.launches, (1 << 32) // size))
        timer = repeated(bench.clock, sum_up, few, bench.place.graph())
        times = in_turns({"": timer}, bench.sizes.rounds)[""]
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

    timer = repeated(bench.clock, solve, 1, bench.place.graph())
    times = [seconds / layers for seconds in in_turns({"": timer}, bench.sizes.rounds)[""]]
    solution = solved.cpu().numpy().astype(np.int64)
    gaps = [
        gap(case.loads, case.tables, layer, solution[layer])
        - optimum(case.loads[layer], case.layout.placement[layer], case.shape.ranks)
        for layer in range(layers)
    ]
    return {"layers": layers, "microseconds": scaled(times, MICRO), "gap": spread(gaps)}


def _micro(seconds: dict[str, list[float]]) -> dict[str, Any]:
    return {name: scaled(times, MICRO) for name, times in seconds.items()}


ENGINE, NAME = "vllm", "eplb_map_to_physical_and_record"
MODULES = (
    "vllm.model_executor.layers.fused_moe.router.base_router",
    "vllm.model_executor.layers.fused_moe.fused_moe",
    "vllm.model_executor.layers.fused_moe.layer",
)
"""Where it is, and where it was before."""
KERNEL_PARAMETERS = (
    "topk_ids",
    "expert_load_view",
    "logical_to_physical_map",
    "logical_replica_count",
    "record_enabled",
    "num_unpadded_tokens",
)
"""What it takes, in any order; another one would be another kernel."""
ABSENT = "vLLM is not installed: the baseline was not checked against it"
PADDED = 3
"""Rows at the end of a batch that are padding, where there are more."""
Kernel = Callable[..., Tensor]


def check_against_vllm(place: Place, sizes: Sizes) -> Figures:
    """Whether our baseline does what the kernel does, and how long that takes; or why not."""
    ours = baseline()
    if find_spec(ENGINE) is None:
        return {"said": ABSENT, "same": None}
    if ours is None or not place.on_device:
        return {"said": "the baseline's kernel is not at hand here", "same": None}
    theirs = find_kernel()
    if isinstance(theirs, str):
        return {"said": theirs, "same": None}
    bench = Bench(Case.of(place, 1), sizes)
    try:
        rows = [
            _compare(bench, theirs, ours.hash_and_count, tokens) for tokens in sizes.other_tokens
        ]
    except Exception as error:  # of another's code, which we do not know
        return {"said": f"vLLM's kernel raised: {type(error).__name__}: {error}", "same": None}
    return {
        "said": f"vLLM {version()}",
        "same": all(row["same"] for row in rows),
        "rows": rows,
    }


def find_kernel() -> Kernel | str:
    """The kernel; or what is wrong with it, in words."""
    for module in MODULES:
        try:
            function = getattr(import_module(module), NAME, None)
        except Exception as error:  # an engine that does not fit the machine raises anything
            return f"vLLM does not import: {type(error).__name__}: {error}"
        if function is not None:
            return _fitting(function)
    return f"vLLM {version()} has no {NAME} where it is looked for"


def version() -> str:
    """Of the engine."""
    return str(getattr(import_module(ENGINE), "__version__", "of unknown version"))


def _fitting(function: Kernel) -> Kernel | str:
    parameters = tuple(inspect.signature(function).parameters)
    if set(parameters) == set(KERNEL_PARAMETERS):
        return function
    return (
        f"vLLM {version()}: {NAME} takes {', '.join(parameters)}, "
        f"and {', '.join(KERNEL_PARAMETERS)} is known"
    )


def _compare(bench: Bench, theirs: Kernel, ours: Callable[..., object], tokens: int) -> Figures:
    """Both on one batch, some of whose rows are padding, and one of whose ids is no expert."""
    batch = Batch.of(bench.case, tokens)
    batch.rows.fill_(max(1, tokens - PADDED))
    batch.ids[-1] = -1
    arguments = _arguments(bench.case, batch)
    bench.place.settle()
    bench.stream.launch(lambda: ours(*baseline_arguments(bench.case, batch)))
    bench.place.settle()
    answer: list[Tensor] = []
    bench.stream.launch(lambda: answer.append(theirs(**arguments)))
    bench.place.settle()
    is_equal = torch.equal(answer[0].reshape(-1).to(torch.int32), batch.slots) and torch.equal(
        arguments["expert_load_view"].to(torch.int32), batch.load
    )
    timers = {
        "theirs": bench.timer(lambda: bench.stream.launch(lambda: theirs(**arguments))),
        "ours": bench.timer(launched(bench.stream, ours, baseline_arguments(bench.case, batch))),
    }
    times = in_turns(timers, bench.sizes.rounds)
    micro = {name: scaled(values, MICRO) for name, values in times.items()}
    return {"tokens": tokens, "same": bool(is_equal), "microseconds": micro}


def _arguments(case: Case, batch: Batch) -> dict[str, Tensor]:
    """As the engine itself keeps them: maps in int64, the load in int32."""
    flag = case.on_device(np.array(True))
    return {
        "topk_ids": batch.ids.view(-1, TOP_K),
        "expert_load_view": torch.zeros_like(batch.load),
        "logical_to_physical_map": case.replicas.slots.long(),
        "logical_replica_count": case.replicas.copies.long(),
        "record_enabled": flag,
        "num_unpadded_tokens": batch.rows[0],
    }
