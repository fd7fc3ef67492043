"""Exact shares with an exchange: sizes by the gathered counts, and by a collective of their own.

Each rank routes batches of all layers, prepares every one of them both ways, and compares.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise import _native
from equipoise.backends.cpu import BACKEND
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares
from equipoise.balancer.experts.routing.layer_update import table_update
from equipoise.balancer.experts.routing.levelled import GroupShareRouter
from equipoise.hal import levelled_routing
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.errors import ExchangeError, GenerationMismatch
from equipoise.hal.kernels import Tables
from equipoise.hal.routing import RoutingTable
from equipoise.hal.stream import Role
from equipoise.pipeline.all_to_all.variable_size import DispatchRoute, VariableSizeExchange

WIDTH = 3


class LoggedCommunicator:
    """A communicator that writes down the names of its operations."""

    def __init__(self, inner: Communicator, log: list[str]) -> None:
        self._inner = inner
        self._log = log

    def __getattr__(self, name: str) -> Any:
        """The operation of that name, or the property."""
        value = getattr(self._inner, name)
        if not callable(value) or name == "close":
            return value

        def logged(*arguments: Any) -> Any:
            self._log.append(name)
            return value(*arguments)

        return logged


@dataclass(frozen=True)
class Layers:
    """A router and an exchange on this rank, and what they have issued."""

    tables: Tables
    router: GroupShareRouter
    exchange: VariableSizeExchange
    rank: int
    log: list[str]

    def route(self, layer: int, ids: Tensor) -> Tensor:
        """Slots of a batch."""
        return self.router.route(layer, 0, ids)

    def prepare(self, layer: int, slots: Tensor, known: bool) -> DispatchRoute:
        """By the gathered counts if they are to be known."""
        counts = self.router.dispatch_counts(layer) if known else None
        return self.exchange.prepare(slots, int(self.tables.generation[layer]), counts)


@contextmanager
def opened(
    fabric: Fabric, placement: list[list[int]], commits: int
) -> Iterator[tuple[Layers, Callable[[Callable[[], object]], None], Callable[[], None]]]:
    """Layers whose tables were committed so often; what runs programs, and what commits again."""
    log: list[str] = []
    accelerator = BACKEND.open(0)
    compute = accelerator.stream(Role.COMPUTE)
    ranks = fabric.control.size
    rows = np.array(placement, dtype=np.int32)
    shape = ExpertShape(len(rows), int(rows.max()) + 1, rows.shape[1], ranks)
    tables = Tables.empty(shape.layers, shape.experts, shape.slots, ranks, accelerator.device)
    update = table_update(
        Layout(rows, even_shares(rows, shape.experts)), shape, range(shape.layers)
    )
    routing, rows_line = (
        LoggedCommunicator(fabric.open(purpose), log) for purpose in ("routing", "experts")
    )
    counters = torch.zeros(shape.layers, shape.experts, dtype=torch.int32)
    router = GroupShareRouter(accelerator, routing, tables, 0, counters, WATCHDOG)
    exchange = VariableSizeExchange(rows_line, shape.slots_per_rank, compute, WATCHDOG)

    def run(program: Callable[[], object]) -> None:
        compute.launch(program)
        compute.synchronize(WATCHDOG)

    def commit() -> None:
        accelerator.kernels.commit_tables(update, tables, compute)
        compute.synchronize(WATCHDOG)

    for _ in range(commits):
        commit()
    yield Layers(tables, router, exchange, fabric.control.rank, log), run, commit
    accelerator.close()


def both_ways(
    fabric: Fabric, placement: list[list[int]], batches: list[Any], top_k: int, mutant: str = ""
) -> list[dict[str, Any]]:
    """By layer: what was issued before rows move, either way, and whether all is the same.

    `batches` has expert ids by rank, layer, token and choice; outside the range they are padding.
    """
    ready = fabric.open("ready")
    own = [torch.tensor(ids, dtype=torch.int32).view(-1, top_k) for ids in batches[ready.rank]]
    verdicts: list[dict[str, Any]] = []

    def serve() -> None:
        for layer, ids in enumerate(own):
            verdicts.append(_both_ways(layers, layer, ids, ready))

    with opened(fabric, placement, commits=1) as (layers, run, _), broken(mutant, layers.rank):
        run(serve)
    return verdicts


def _both_ways(layers: Layers, layer: int, ids: Tensor, ready: Communicator) -> dict[str, Any]:
    layers.log.clear()
    slots = layers.route(layer, ids)
    difference, known = "", None
    try:
        known = layers.prepare(layer, slots, known=True)
    except (ExchangeError, GenerationMismatch) as error:
        difference = str(error)
    issued_known = [*layers.log]
    layers.log.clear()
    told = layers.prepare(layer, slots, known=False)
    issued_told = [*layers.log]
    if known is not None and not same_route(known, told):
        difference = f"{known} differs from {told}"
    # No rank sends rows by sizes that another one finds wrong: it would wait for them.
    different = torch.tensor([bool(difference)], dtype=torch.int32)
    ready.all_reduce(different).result(WATCHDOG)
    if known is not None and not int(different) and not _same_outputs(layers, known, told):
        difference = "outputs differ"
    return {"known": issued_known, "told": issued_told, "difference": difference}


def same_route(first: DispatchRoute, second: DispatchRoute) -> bool:
    """Whether two routes say the same in every part."""
    numbers = [(r.tokens, r.top_k, r.send_counts, r.recv_counts) for r in (first, second)]
    return (
        numbers[0] == numbers[1]
        and torch.equal(first.send_order, second.send_order)
        and torch.equal(first.local_slots, second.local_slots)
    )


def _same_outputs(layers: Layers, known: DispatchRoute, told: DispatchRoute) -> bool:
    seeded = torch.Generator().manual_seed(layers.rank)
    tokens = torch.randn(known.tokens, WIDTH, generator=seeded)
    outputs = []
    for route in (known, told):
        (rows,) = layers.exchange.dispatch(route, [tokens])
        computed = torch.sin(rows) * (1 + route.local_slots[:, None])
        outputs.append(layers.exchange.combine(route, computed))
    return torch.equal(outputs[0].view(torch.int32), outputs[1].view(torch.int32))


def mismatch(fabric: Fabric, generations: list[int], mutant: str = "") -> dict[str, Any]:
    """Ranks whose tables were committed so often dispatch; then again after as many on all."""
    rank = fabric.control.rank
    slots_of_rank = [[expert % 2 for expert in range(2 * len(generations))]]
    ids = torch.tensor([[0], [1], [0]], dtype=torch.int32)
    raised: list[str] = []
    issued: list[list[str]] = []
    received: list[int] = []

    def dispatch() -> None:
        layers.log.clear()
        slots = layers.route(0, ids)
        try:
            layers.prepare(0, slots, known=True)
        except GenerationMismatch as error:
            raised.append(str(error))
        issued.append([*layers.log])

    def again() -> None:
        route = layers.prepare(0, layers.route(0, ids), known=True)
        (rows,) = layers.exchange.dispatch(route, [torch.ones(3, 1)])
        received.append(len(rows))

    with opened(fabric, slots_of_rank, generations[rank]) as (layers, run, commit):
        with broken(mutant, rank):
            run(dispatch)
        for _ in range(max(generations) - generations[rank]):
            commit()
        run(again)
    return {"raised": raised, "issued": issued, "received": received[0]}


@contextmanager
def broken(mutant: str, rank: int) -> Iterator[None]:
    """The router or the exchange with one behaviour broken on every rank, if one is named."""
    with pytest.MonkeyPatch.context() as patch:
        if mutant:
            MUTANTS[mutant](patch, rank)
        yield


Mutate = Callable[[pytest.MonkeyPatch, int], None]


def _divide(change: Callable[[dict[str, Any]], None]) -> Mutate:
    """The division with changed arguments."""

    def mutate(patch: pytest.MonkeyPatch, rank: int) -> None:
        original = _native.levelled_group_rows
        names = ("counts", "start", "replicas", "ranks", "group", "layer", "rows")

        def divided(*arguments: Any) -> None:
            named = dict(zip(names, arguments, strict=True)) | {"rank": rank}
            change(named)
            original(*(named[name] for name in names))

        patch.setattr(_native, "levelled_group_rows", divided)

    return mutate


def _cut_one_row_late(patch: pytest.MonkeyPatch, rank: int) -> None:
    original = levelled_routing.quota_ends

    def late(counts: Tensor, table: RoutingTable, *rest: int) -> list[int]:
        lasts = {int(end) - 1 for end in table.start[1:]}
        cut = enumerate(original(counts, table, *rest))
        return [end if entry in lasts else end + 1 for entry, end in cut]

    patch.setattr(levelled_routing, "quota_ends", late)
    _by_reference(patch)


def _no_sweeps(patch: pytest.MonkeyPatch, rank: int) -> None:
    patch.setattr(levelled_routing, "SWEEPS_OF_GROUP", 0)
    _by_reference(patch)


def _by_reference(patch: pytest.MonkeyPatch) -> None:
    def divided(counts: Tensor, start: Tensor, replicas: Tensor, *rest: Any) -> None:
        ranks, group, layer, rows = rest
        table = RoutingTable(start, replicas, replicas)
        rows.copy_(levelled_routing.group_rows(counts, table, ranks, group, layer))

    patch.setattr(_native, "levelled_group_rows", divided)


def _generations_not_compared(patch: pytest.MonkeyPatch, rank: int) -> None:
    patch.setattr(VariableSizeExchange, "_check_generations", lambda *arguments: None)


def _own_generation_for_all(patch: pytest.MonkeyPatch, rank: int) -> None:
    original = GroupShareRouter.dispatch_counts

    def own(router: GroupShareRouter, layer: int) -> Any:
        counts = original(router, layer)
        assert counts is not None
        generations = (counts.generations[rank],) * len(counts.generations)
        return type(counts)(counts.rows, generations)

    patch.setattr(GroupShareRouter, "dispatch_counts", own)


def _rows_to_send_for_rows_to_receive(patch: pytest.MonkeyPatch, rank: int) -> None:
    original = VariableSizeExchange._known_counts

    def sent(exchange: VariableSizeExchange, counts: Any, sends: Tensor, generation: int) -> Tensor:
        return original(exchange, counts, sends, generation).new_tensor(sends.tolist())

    patch.setattr(VariableSizeExchange, "_known_counts", sent)


MUTANTS: dict[str, Mutate] = {
    "a quota ends one row late": _cut_one_row_late,
    "no sweeps before the cut": _no_sweeps,
    "the dither of the next group": _divide(lambda a: a.update(group=a["group"] + 1)),
    "the dither of the rank itself": _divide(lambda a: a.update(group=a["rank"])),
    "the dither of another layer": _divide(lambda a: a.update(layer=a["layer"] + 1)),
    "ranks in reverse order": _divide(lambda a: a.update(counts=a["counts"].flip(0))),
    "what it sends for what it receives": _rows_to_send_for_rows_to_receive,
    "generations are not compared": _generations_not_compared,
    "its own generation for all": _own_generation_for_all,
}
"""What is broken, and how."""
