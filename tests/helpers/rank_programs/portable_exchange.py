"""Dispatch and combine among ranks, each beside a dense reference."""

from typing import Any

import torch
from helpers.rank_programs.tensor_patterns import DTYPES, pattern, same
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.backends.cpu import BACKEND
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.errors import GenerationMismatch
from equipoise.hal.stream import Role
from equipoise.pipeline.all_to_all.variable_size import DispatchRoute, VariableSizeExchange

Grids = list[list[list[int]]]
"""Slot ids by rank, token and choice."""


def round_trip(
    fabric: Fabric, grids: Grids, top_k: int, per_rank: int, payloads: list[tuple[list[int], str]]
) -> int:
    """Send every payload to its slots and back; returns how many rows arrived here."""
    group, accelerator = fabric.open("dispatch"), BACKEND.open(0)
    stream = accelerator.stream(Role.COMPUTE)
    exchange = VariableSizeExchange(group, per_rank, stream, WATCHDOG)
    rows: list[int] = []
    stream.launch(lambda: rows.append(_round(exchange, group, grids, top_k, per_rank, payloads)))
    stream.synchronize(WATCHDOG)
    accelerator.close()
    return rows[0]


def _round(
    exchange: VariableSizeExchange,
    group: Communicator,
    grids: Grids,
    top_k: int,
    per_rank: int,
    payloads: list[tuple[list[int], str]],
) -> int:
    slots = [torch.tensor(grid, dtype=torch.int32).view(-1, top_k) for grid in grids]
    tokens = slots[group.rank].shape[0]
    route = exchange.prepare(slots[group.rank], generation=7)
    _check_route(route, slots, group.rank, per_rank)
    data = [
        [pattern(n, rank, [grid.shape[0], *shape], dtype) for rank, grid in enumerate(slots)]
        for n, (shape, dtype) in enumerate(payloads)
    ]
    arrived = exchange.dispatch(route, [by_rank[group.rank] for by_rank in data])
    sources = _sources(slots, group.rank, per_rank)
    for actual, by_rank in zip(arrived, data, strict=True):
        expected = [by_rank[rank][position // top_k] for rank, position, _ in sources]
        _equal(actual, _stack(expected, by_rank[0]))
    shape, dtype = payloads[0]
    for row, (_, _, local) in zip(arrived[0], sources, strict=True):
        row.copy_(_expert(row, group.rank * per_rank + local))
    combined = exchange.combine(route, arrived[0])
    mine, total = data[0][group.rank], group.size * per_rank
    expected_results = torch.zeros(tokens, top_k, *shape).to(DTYPES[dtype])
    for token in range(tokens):
        for k, slot in enumerate(slots[group.rank][token].tolist()):
            if slot < total:
                expected_results[token, k] = _expert(mine[token], slot)
    _equal(combined, expected_results)
    return len(sources)


def _check_route(route: DispatchRoute, slots: list[Tensor], rank: int, per_rank: int) -> None:
    sources = _sources(slots, rank, per_rank)
    assert route.local_slots.tolist() == [local for _, _, local in sources]
    assert list(route.recv_counts) == [
        sum(r == peer for r, _, _ in sources) for peer in range(len(slots))
    ]
    homes = (slots[rank].reshape(-1) // per_rank).tolist()
    assert list(route.send_counts) == [homes.count(peer) for peer in range(len(slots))]


def _sources(slots: list[Tensor], rank: int, per_rank: int) -> list[tuple[int, int, int]]:
    """(source rank, position in its grid, local slot) of each row to arrive, in order."""
    return [
        (source, position, local)
        for source, grid in enumerate(slots)
        for local in range(per_rank)
        for position, slot in enumerate(grid.reshape(-1).tolist())
        if slot == rank * per_rank + local
    ]


def _expert(row: Tensor, slot: int) -> Tensor:
    """What slot `slot` makes of a row: differs between slots in every dtype, exactly."""
    return ((row.double() + slot) % 8).to(row.dtype)


def _stack(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(rows) if rows else like[:0]


def _equal(actual: Tensor, expected: Tensor) -> None:
    assert same(actual.contiguous(), expected), f"expected {expected}, got {actual}"


def mismatch(fabric: Fabric, generations: list[int]) -> Any:
    """Prepare with another generation on some ranks; then again with the same on all."""
    group, accelerator = fabric.open("dispatch"), BACKEND.open(0)
    exchange = VariableSizeExchange(group, 2, accelerator.stream(Role.COMPUTE), WATCHDOG)
    slots = torch.zeros(3, 1, dtype=torch.int32)
    message = ""
    try:
        exchange.prepare(slots, generations[group.rank])
    except GenerationMismatch as error:
        message = str(error)
    route = exchange.prepare(slots, 9)
    return {"told": message, "receives": list(route.recv_counts)}
