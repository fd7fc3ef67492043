"""Our policy in SGLang's own `EPLBManager`, whose updater moves the weights."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytestmark = pytest.mark.timeout(900)
Play = Callable[..., list[Any]]
Table = npt.NDArray[np.int64]
OURS = '{"eplb_policy": true}'
LAYERS, EXPERTS, REDUNDANT, RANKS = 3, 16, 4, 2


def load(seed: int, noise: int) -> Any:
    """(2 steps, layers, experts) of a kind of traffic; `noise` draws the window."""
    steep = np.sort(np.random.default_rng(seed).pareto(1.2, (LAYERS, EXPERTS)))[:, ::-1]
    order = np.random.default_rng(seed + 1).permuted(np.tile(range(EXPERTS), (LAYERS, 1)), axis=1)
    mean = 2000 * np.take_along_axis(steep, order, axis=1) + 50
    return np.random.default_rng(noise).poisson(np.stack([mean, mean])).tolist()


TWO_SWITCHES = [load(kind, 10 * kind + window) for kind in (1, 2, 3) for window in range(4)]


def imbalance(window: Any, table: Table) -> float:
    """max/mean - 1 of the ranks under an even split, mean over layers."""
    found = []
    for counts, row in zip(np.array(window).sum(axis=0), table, strict=True):
        part = counts / np.bincount(row, minlength=EXPERTS)
        ranks = part[row].reshape(RANKS, -1).sum(axis=1)
        found.append(ranks.max() / ranks.mean() - 1)
    return float(np.mean(found))


def copies(before: Table, after: Table) -> int:
    """Experts that come to a rank that did not hold them, which the updater fetches from a peer."""
    shape = LAYERS, RANKS, -1
    return sum(
        len(set(new) - set(old))
        for old_layer, new_layer in zip(before.reshape(shape), after.reshape(shape), strict=True)
        for old, new in zip(old_layer, new_layer, strict=True)
    )


def serve(play: Play, plugin: str | None, chunk: int | None = None) -> tuple[Any, list[Table]]:
    answers = play(
        "eplb_manager:balance", RANKS, loads=TWO_SWITCHES, experts=EXPERTS, redundant=REDUNDANT,
        chunk=chunk, plugin=plugin,
    )  # fmt: skip
    assert all(answer["marks"] for answer in answers)
    assert answers[0]["maps"] == answers[1]["maps"], "ranks serve different placements"
    return answers[0], [np.array(table) for table in answers[0]["maps"]]


def test_sglang_moves_fewer_experts_at_no_worse_balance(play: Play) -> None:
    (_, stock), (_, ours) = serve(play, None), serve(play, OURS)
    stock_copies, our_copies = (sum(map(copies, maps, maps[1:])) for maps in (stock, ours))
    assert our_copies < stock_copies / 3
    after = [
        np.mean(
            [imbalance(window, table) for window, table in zip(TWO_SWITCHES, maps[1:], strict=True)]
        )
        for maps in (stock, ours)
    ]
    assert after[1] <= after[0] + 0.01


@pytest.mark.parametrize("chunk", [None, 1])
def test_sglang_updates_only_layers_that_change(play: Play, chunk: int | None) -> None:
    answer, maps = serve(play, OURS, chunk)
    changed = [
        np.flatnonzero((before != after).any(axis=1)).tolist() for before, after in pairwise(maps)
    ]
    if chunk is None:
        assert answer["updates"] == [layers for layers in changed if layers]
    assert sorted({layer for layers in answer["updates"] for layer in layers}) == sorted(
        {layer for layers in changed for layer in layers}
    )
    assert len(answer["updates"]) < len(TWO_SWITCHES) * (1 if chunk is None else LAYERS)


def test_sglang_start_needs_eplb_to_be_enabled(play: Play) -> None:
    off, on = (
        play("eplb_manager:start", 1, settings=OURS, **arguments)
        for arguments in ({}, {"enable_eplb": True, "ep_size": 2, "tp_size": 2})
    )
    assert (off, on) == (["equipoise: eplb_policy needs --enable-eplb"], [""])


def test_sglang_without_settings_is_stock(play: Play) -> None:
    (first, _), (second, _) = serve(play, None), serve(play, " ")
    assert first == second


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
