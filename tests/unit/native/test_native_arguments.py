"""Arguments that do not fit are refused with one line that names them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from equipoise import _native

Call = Callable[[], object]
TOO_MANY = 2**46


def i32(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def i64(*rows: tuple[int, ...]) -> NDArray[np.int64]:
    return np.array(rows, dtype=np.int64)


def zeros(size: int) -> NDArray[np.int32]:
    return np.zeros(size, dtype=np.int32)


def frozen(size: int) -> NDArray[np.int32]:
    array = zeros(size)
    array.flags.writeable = False
    return array


def route(**overrides: object) -> Call:
    """A call of route_hashed that is valid except for `overrides`."""
    defaults: dict[str, object] = {
        "ids": i32(0, 1),
        "start": i32(0, 1, 3),
        "replicas": i32(2, 0, 1),
        "cumulative": i32(65536, 1, 65536),
        "rank": 0,
        "layer": 0,
        "step": 0,
        "slots": zeros(2),
        "counts": zeros(2),
    }
    return lambda: _native.route_hashed(**(defaults | overrides))  # type: ignore[arg-type]


def table(placement: NDArray[np.int32], shares: NDArray[np.int32], experts: int = 2) -> Call:
    out = zeros(experts + 1), zeros(len(placement)), zeros(len(placement))
    return lambda: _native.build_table(placement, shares, experts, *out)


def rule(name: str, **overrides: object) -> Call:
    """A call of another engine's rule that is valid except for `overrides`."""
    defaults: dict[str, object] = {
        "ids": i32(0, 1),
        "start": i32(0, 1, 3),
        "replicas": i32(2, 0, 1),
        "slots": zeros(2),
        "counts": zeros(2),
    }
    own = {"route_by_row_hash": {"top_k": 1, "rows": 2}, "route_by_block_turns": {"offset": 0}}
    return lambda: getattr(_native, name)(**(defaults | own[name] | overrides))


def plan(**overrides: object) -> Call:
    """A call of plan that is valid except for `overrides`; `aims` by place."""
    aims = i32(1311, 6554, 78643, 65536, 0, 0, 0)
    for place, value in overrides.pop("aims", {}).items():  # type: ignore[attr-defined]
        aims[place] = value
    defaults: dict[str, object] = {
        "load": i64((7, 5)),
        "windows": None,
        "slots": 4,
        "capacity": i32(65536, 65536),
        "nodes": 1,
        "survive": 0,
        "installed": i32(0, 1, 0, 1)[None],
        "policy": 2,
        "allowance": np.array([4]),
        "per_rank": 4,
        "threads": 1,
    }
    return lambda: _native.plan(**(defaults | {"aims": aims} | overrides))  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Call, str]] = {
    "list": (lambda: _native.checksum([1]), "data: expected uint8 of 1 dimension"),  # type: ignore[arg-type]
    "dtype": (route(ids=np.zeros(2)), "ids: expected int32 .* got float64 of 1 dimension"),
    "int64 ids": (route(ids=np.zeros(2, dtype=np.int64)), "ids: .* got int64"),
    "dims": (route(ids=np.zeros((2, 1), dtype=np.int32)), "ids: .* got int32 of 2 dimensions"),
    "strided": (route(ids=zeros(4)[::2]), "ids: .* got a strided array"),
    "read-only": (route(slots=frozen(2)), "slots: expected .*writable"),
    "device": (route(ids=torch.zeros(2, dtype=torch.int32, device="meta")), "ids: .* on the host"),
    "short slots": (route(slots=zeros(1)), "slots: expected 2 elements, got 1"),
    "short counts": (route(counts=zeros(1)), "counts: expected 2 elements, got 1"),
    "short cumulative": (route(cumulative=i32(65536, 65536)), "cumulative: expected 3 elements"),
    "rank": (route(rank=-1), "rank: expected 0 to 2147483647, got -1"),
    "step": (route(step=-1), "step: expected 0 to .*, got -1"),
    "empty start": (route(start=i32()), "start: expected at least 2 elements, got 0"),
    "start end": (route(start=i32(0, 1, 2)), "start: expected 0 first"),
    "empty run": (route(start=i32(0, 3, 3)), "start: expected a slot for every expert"),
    "falling start": (route(start=i32(0, 9, 3)), "start: expected a slot for every expert"),
    "replica": (route(replicas=i32(2, 0, 3)), "replicas: expected 0 to 2, got 3"),
    "unfinished run": (route(cumulative=i32(65536, 1, 65535)), "cumulative: expected 65536 at"),
    "falling run": (route(cumulative=i32(65536, 65536, 1)), "cumulative: expected 65536 to 65536"),
    "slots": (lambda: _native.plan_greedy(i64((1, 2, 3)), 2, 1), "slots: expected 3 to"),
    "ranks": (lambda: _native.plan_greedy(i64((1, 2)), 4, 3), "ranks: expected a .*divisor of 4"),
    "no ranks": (lambda: _native.plan_greedy(i64((1, 2)), 4, 0), "ranks: expected a positive"),
    "negative load": (lambda: _native.plan_greedy(i64((1, -2)), 4, 2), "load: .*, got -2"),
    "huge load": (lambda: _native.plan_greedy(i64((TOO_MANY - 1, 1)), 4, 2), "load: .* below 2.46"),
    "no experts": (
        lambda: _native.plan_greedy(np.zeros((1, 0), dtype=np.int64), 4, 2),
        "load columns: expected 1",
    ),
    "other shape": (
        lambda: _native.align(i32(0, 1)[None], i32(0, 1, 2)[None], 1),
        "proposed columns: expected 2 elements, got 3",
    ),
    "negative expert": (
        lambda: _native.count_moves(i32(0, 1)[None], i32(0, -1)[None], 1),
        "proposed: expected 0 to .*, got -1",
    ),
    "homeless": (
        lambda: _native.solve_shares(i64((1, 1)), i32(0, 0)[None], 1),
        "placement: expected a slot for every expert, got none for expert 1",
    ),
    "stranger": (
        lambda: _native.solve_shares(i64((1, 1)), i32(0, 2)[None], 1),
        "placement: expected 0 to 1, got 2",
    ),
    "sweeps": (
        lambda: _native.solve_shares(i64((1, 1)), i32(0, 1)[None], 1, -1),
        "sweeps: expected 0 to",
    ),
    "counts": (
        lambda: _native.solve_cumulative(i32(1), i32(0, 1, 2), i32(0, 1), 1, 1, zeros(2)),
        "counts: expected 2 elements, got 1",
    ),
    "huge counts": (
        lambda: _native.solve_shares(i64((TOO_MANY, 1)), i32(0, 1)[None], 1),
        "counts: expected 0 to",
    ),
    "table homeless": (table(i32(0, 0), i32(1, 65535)), "got none for expert 1"),
    "table sum": (table(i32(0, 1), i32(65536, 65535)), "sum of 65536 .* expert 1"),
    "table share": (table(i32(0, 1), i32(65536, -1)), "shares: expected 0 to 65536, got -1"),
    "tiny capacity": (
        plan(load=i64((2**40, 5)), capacity=i32(1, 65536)),
        "load of a layer, with that capacity: expected 0 to 1073741823, got",
    ),
    "vast capacity": (
        plan(slots=16, installed=None, policy=1, capacity=np.full(8, 2**31 - 1, np.int32)),
        "sum of capacity: expected 1 to",
    ),
    "no capacity": (plan(capacity=i32()), "capacity: expected a rank at least"),
    "target": (plan(aims={0: 2**31 - 1}), "target: expected 0 to 65536000, got"),
    "slack": (plan(aims={1: 65537}), "slack: expected 0 to 65536, got 65537"),
    "hysteresis": (plan(aims={2: -1}), "hysteresis: expected 0 to 65536000, got -1"),
    "free node": (plan(aims={3: 0}), "node_cost: expected 65536 to 65536000, got 0"),
    "rows of none": (rule("route_by_row_hash", top_k=0), "top_k: expected 1 to .*, got 0"),
    "offset": (rule("route_by_block_turns", offset=-1), "offset: expected 0 to .*, got -1"),
    "rule slots": (rule("route_by_row_hash", slots=zeros(1)), "slots: expected 2 elements, got 1"),
    "rule counts": (rule("route_by_block_turns", counts=zeros(3)), "counts: expected 2 elements"),
    "rule replica": (
        rule("route_by_row_hash", replicas=i32(2, 0, 3)),
        "replicas: expected 0 to 2, got 3",
    ),
    "rule run": (rule("route_by_block_turns", start=i32(0, 3, 3)), "start: expected a slot for"),
    "table sizes": (table(i32(0, 1), i32(65536)), "shares: expected 2 elements, got 1"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_native_rejects_bad_argument_with_one_line(call: Call, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_native_accepts_read_only_inputs() -> None:
    counts = zeros(2)
    route(ids=frozen(2), counts=counts)()
    assert counts.tolist() == [2, 0]


def test_native_plan_takes_right_arguments() -> None:
    assert plan()() is not None


def test_native_router_refuses_more_workers_than_a_simulation_has() -> None:
    with pytest.raises(ValueError, match="workers: expected 1 to 65536"):
        _native.Router(_native.PolicySettings(), 2**31 - 1, 8, 8)


WRITTEN = ("start", "replicas", "cumulative")


PAIRS = [
    (output, other)
    for output in WRITTEN
    for other in ("placement", "shares", *WRITTEN)
    if output != other
]


@pytest.mark.parametrize(("output", "other"), PAIRS)
@pytest.mark.parametrize("kind", ["one layer", "layers"])
def test_build_table_refuses_outputs_that_share_memory(output: str, other: str, kind: str) -> None:
    """Sorted into itself, a placement was its own cursor: writes went beyond the end."""
    single = kind == "one layer"
    slots, experts = 6, 5
    memory = np.arange(64, dtype=np.int32) % experts
    columns = dict.fromkeys(("placement", "shares", *WRITTEN), slots) | {"start": experts + 1}
    arrays = {
        name: np.ascontiguousarray(np.arange(count, dtype=np.int32) % experts)
        for name, count in columns.items()
    }
    arrays["shares"][:] = [32768, 65536, 65536, 65536, 65536, 32768]
    # They meet in the last element of the one and the first of the other.
    arrays[other] = memory[: columns[other]]
    arrays[output] = memory[columns[other] - 1 :][: columns[output]]
    if not single:
        arrays = {name: array[None] for name, array in arrays.items()}
    build = _native.build_table if single else _native.build_tables
    if other == "shares":
        arrays["shares"][:] = 0
    with pytest.raises(ValueError, match="memory of its own, got memory of"):
        build(arrays["placement"], arrays["shares"], experts, *(arrays[n] for n in WRITTEN))


def test_build_table_takes_neighbouring_memory() -> None:
    memory = np.zeros(9, dtype=np.int32)
    start, replicas, cumulative = memory[:3], memory[3:6], memory[6:]
    _native.build_table(i32(0, 1, 0), i32(1, 65536, 65535), 2, start, replicas, cumulative)
    assert memory.tolist() == [0, 2, 3, 0, 2, 1, 1, 65536, 65536]
