"""Our policy in SGLang's own `EPLBManager`, whose updater moves the weights."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang_cpu.recorded_load import recorded_windows

pytestmark = pytest.mark.timeout(900)
Play = Callable[..., list[Any]]
Table = npt.NDArray[np.int64]
OURS = '{"eplb_policy": true}'
PREFIX = "equipoise_sglang_"
LAYERS, EXPERTS, REDUNDANT, RANKS = 3, 16, 4, 2
DISPATCH_RANKS = 4
"""As many that `static` can divide an expert."""


def load(seed: int, noise: int, tail: float) -> Any:
    """(2 steps, layers, experts) of a kind of traffic; `noise` draws the window."""
    steep = np.sort(np.random.default_rng(seed).pareto(tail, (LAYERS, EXPERTS)))[:, ::-1]
    order = np.random.default_rng(seed + 1).permuted(np.tile(range(EXPERTS), (LAYERS, 1)), axis=1)
    mean = 2000 * np.take_along_axis(steep, order, axis=1) + 50
    return np.random.default_rng(noise).poisson(np.stack([mean, mean])).tolist()


WINDOWS = 4
TWO_SWITCHES, MILD_SWITCHES = (
    [load(kind, 10 * kind + window, tail) for kind in (1, 2, 3) for window in range(WINDOWS)]
    for tail in (1.2, 3)
)
"""In the first, one expert may have most of a layer's load: four ranks cannot divide it finely."""


def imbalance(window: Any, table: Table) -> float:
    """max/mean - 1 of the ranks under an even split, mean over layers."""
    found = []
    for counts, row in zip(np.array(window).sum(axis=0), table, strict=True):
        part = counts / np.bincount(row, minlength=EXPERTS)
        ranks = part[row].reshape(RANKS, -1).sum(axis=1)
        found.append(ranks.max() / ranks.mean() - 1)
    return float(np.mean(found))


def dispatched_imbalance(answers: Any, windows: int = WINDOWS) -> float:
    """max/mean - 1 of the ranks by SGLang's dispatch, mean over layers and over windows before
    which traffic did not switch, as it does after so many windows."""
    rows = np.array([answer["rows"] for answer in answers]).sum(axis=0)
    steady = [number for number in range(len(rows)) if (number + 1) % windows]
    ranks = rows[steady].reshape(len(steady), rows.shape[1], len(answers), -1).sum(axis=3)
    return float((ranks.max(axis=2) / ranks.mean(axis=2) - 1).mean())


def copies(before: Table, after: Table, ranks: int = RANKS) -> int:
    """Experts that come to a rank that did not hold them, which the updater fetches from a peer."""
    shape = len(before), ranks, -1
    return sum(
        len(set(new) - set(old))
        for old_layer, new_layer in zip(before.reshape(shape), after.reshape(shape), strict=True)
        for old, new in zip(old_layer, new_layer, strict=True)
    )


def serve(
    play: Play,
    plugin: str | None,
    chunk: int | None = None,
    ranks: int = RANKS,
    dispatch: str = "dynamic",
    loads: Any = TWO_SWITCHES,
    redundant: int = REDUNDANT,
) -> list[Any]:
    """What each rank answers."""
    answers = play(
        "eplb_manager:balance", ranks, loads=loads, experts=len(loads[0][0][0]),
        redundant=redundant, chunk=chunk, plugin=plugin, dispatch=dispatch,
    )  # fmt: skip
    assert all(answer["marks"] for answer in answers)
    for answer in answers:
        assert answer["maps"] == answers[0]["maps"], "ranks serve different placements"
    return answers


def installed(answers: list[Any]) -> list[Table]:
    """The placements, first to last."""
    return [np.array(table) for table in answers[0]["maps"]]


def test_sglang_moves_fewer_experts_at_no_worse_balance(play: Play) -> None:
    stock, ours = (installed(serve(play, plugin)) for plugin in (None, OURS))
    stock_copies, our_copies = (sum(map(copies, maps, maps[1:])) for maps in (stock, ours))
    assert our_copies < stock_copies / 3
    after = [
        np.mean(
            [imbalance(window, table) for window, table in zip(TWO_SWITCHES, maps[1:], strict=True)]
        )
        for maps in (stock, ours)
    ]
    assert after[1] <= after[0] + 0.01


@pytest.mark.parametrize("dispatch", ["static", "dynamic"])
def test_sglang_moves_a_tenth_on_recorded_load_at_no_worse_balance(
    play: Play, dispatch: str
) -> None:
    """Two switches of text in thirty windows: stock moves in each, and ours after a switch."""
    loads = [window.tolist() for window in recorded_windows(steps=40)]
    stock, ours = (
        serve(play, plugin, ranks=DISPATCH_RANKS, dispatch=dispatch, loads=loads, redundant=8)
        for plugin in (None, OURS)
    )
    stock_copies, our_copies = (
        sum(copies(*pair, DISPATCH_RANKS) for pair in pairwise(installed(answers)))
        for answers in (stock, ours)
    )
    assert our_copies <= stock_copies / 10
    stock_imbalance, our_imbalance = (dispatched_imbalance(each, 10) for each in (stock, ours))
    assert our_imbalance <= stock_imbalance


@st.composite
def drawn_windows(draw: st.DrawFn) -> dict[str, Any]:
    """A load of any shape that two ranks can have, with its redundant slots and a dispatch."""
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    counts = st.integers(0, 1000) | st.just(0)
    row = st.lists(counts, min_size=experts, max_size=experts)
    step = st.lists(row, min_size=layers, max_size=layers)
    return {
        "loads": draw(st.lists(step, min_size=1, max_size=3)),
        "redundant": draw(st.integers(0, 4)) * RANKS + experts % RANKS,
        "dispatch": draw(st.sampled_from(["static", "dynamic", "fake"])),
    }


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(window=drawn_windows())
def test_sglang_gets_metadata_of_any_shape_as_its_own_algorithm_makes(
    play: Play, window: dict[str, Any]
) -> None:
    """The contract of `rebalance_experts`, and of the metadata that SGLang makes of its answer."""
    stock, ours = (
        play("eplb_manager:plan", RANKS, plugin=plugin, **window) for plugin in (None, OURS)
    )
    for theirs, own in zip(stock, ours, strict=True):
        assert own.keys() == theirs.keys()
        for name, field in theirs.items():
            assert (own[name] is None) == (field is None), name
            if field is not None:
                assert (own[name]["shape"], own[name]["type"]) == (field["shape"], field["type"])
        assert own["physical_to_logical_map"] == ours[0]["physical_to_logical_map"]
        assert own["physical_to_logical_map"] == own["physical_to_logical_map_cpu"]
        check_tables(own, window["dispatch"])


def check_tables(metadata: dict[str, Any], dispatch: str) -> None:
    """Every expert has a slot, and every table names slots that hold the expert."""
    values = {name: field["values"] for name, field in metadata.items() if field is not None}
    static = values.get("logical_to_rank_dispatch_physical_map")
    assert (static is not None) == (dispatch == "static")
    for layer, held in enumerate(values["physical_to_logical_map"]):
        for expert, on_host in enumerate(values["logical_to_all_physical_map_cpu"][layer]):
            slots = [slot for slot, other in enumerate(held) if other == expert]
            assert slots
            assert sorted(on_host[: len(slots)]) == slots
            assert set(on_host[len(slots) :]) <= {-1}
            listed = values["logical_to_all_physical_map"][layer][expert]
            valid = values["logical_to_all_physical_map_num_valid"][layer][expert]
            assert set(listed[:valid]) <= set(slots)
            assert valid >= 1
            assert set(listed[valid:]) <= {-1}
            assert static is None or static[layer][expert] in slots


@pytest.mark.parametrize(("dispatch", "fraction"), [("static", 0.75), ("dynamic", 0.9)])
def test_sglang_dispatch_is_levelled_by_load(play: Play, dispatch: str, fraction: float) -> None:
    stock, ours = (
        dispatched_imbalance(
            serve(play, plugin, ranks=DISPATCH_RANKS, dispatch=dispatch, loads=MILD_SWITCHES)
        )
        for plugin in (None, OURS)
    )
    assert ours < fraction * stock, (ours, stock)


@pytest.mark.parametrize("chunk", [None, 1])
def test_sglang_moves_weights_only_of_layers_that_change(play: Play, chunk: int | None) -> None:
    answers = serve(play, OURS, chunk)
    maps, updates = installed(answers), answers[0]["updates"]
    changed = [
        np.flatnonzero((before != after).any(axis=1)).tolist() for before, after in pairwise(maps)
    ]
    every = list(range(LAYERS))
    assert sum(len(layers) < LAYERS for layers in changed) > WINDOWS, "too few layers are left out"
    if chunk is None:
        assert updates == [every] * len(TWO_SWITCHES)
    else:
        # Those that only get another table first, all together.
        assert updates == [
            layers
            for moved in changed
            for layers in (
                [layer for layer in every if layer not in moved],
                *([layer] for layer in moved),
            )
            if layers
        ]


def test_sglang_metrics_count_what_the_first_rank_planned(play: Play) -> None:
    answers = serve(play, OURS)
    moved = sum(int((after != before).sum()) for before, after in pairwise(installed(answers)))
    counted = answers[0]["metrics"]
    assert (counted[PREFIX + "rebalances_total"], counted[PREFIX + "moved_slots_total"]) == (
        len(TWO_SWITCHES),
        moved,
    )
    assert 0.5 < counted[PREFIX + "balancedness"] <= 1
    assert answers[1]["metrics"] == {}


def test_sglang_start_needs_eplb_to_be_enabled(play: Play) -> None:
    off, on = (
        play("eplb_manager:start", 1, settings=OURS, **arguments)[0]["error"]
        for arguments in ({}, {"enable_eplb": True, "ep_size": 2, "tp_size": 2})
    )
    assert (off, on) == ("equipoise cannot be switched on: eplb_policy needs --enable-eplb", None)


def test_sglang_without_settings_is_stock(play: Play) -> None:
    assert serve(play, None) == serve(play, " ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{", "EQUIPOISE_SGLANG"),
        ('{"eplb": true}', "eplb is not for SGLang, only eplb_policy is"),
        ('{"eplb_policy": {"gain": 1}}', "unknown gain"),
    ],
)
def test_sglang_ends_for_wrong_settings(play: Play, settings: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        serve(play, settings)
