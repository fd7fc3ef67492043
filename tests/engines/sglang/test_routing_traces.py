"""What SGLang itself writes of routing is read: its recorder's dumps and its responses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.strategies.trace_samples import random_ids

from equipoise.balancer.formats import CountsTrace, RoutingTrace, TraceUnit, read_trace

pytestmark = pytest.mark.timeout(900)
Play = Callable[..., list[Any]]
LAYERS, EXPERTS, TOP_K, RANKS, PASSES = 3, 8, 2, 2, 4
SLOT_MAP = np.tile(np.arange(EXPERTS + 2) % EXPERTS, (LAYERS, 1))
"""Two experts have two slots."""


def passes() -> list[list[Any]]:
    """Expert ids by pass and rank, (tokens, layers, top_k)."""
    return [
        [random_ids(10 * step + rank, 3 + rank, LAYERS, TOP_K, EXPERTS) for rank in range(RANKS)]
        for step in range(PASSES)
    ]


def dumped(play: Play, folder: Path, mode: str, routed: list[list[Any]]) -> Path:
    """A folder of dumps, in which every second token goes to the second slot of its expert."""
    slots = [
        [
            np.where((ids < 2) & (np.arange(len(ids)) % 2 == 1)[:, None, None], ids + EXPERTS, ids)
            .transpose(1, 0, 2)
            .tolist()
            for ids in of_ranks
        ]
        for of_ranks in routed
    ]
    play(
        "recorder:dump", RANKS, folder=str(folder), mode=mode, passes=slots,
        slot_map=SLOT_MAP.tolist(),
    )  # fmt: skip
    assert len(list(folder.iterdir())) == RANKS
    return folder


def test_recorder_per_token_reads_as_routing_trace(play: Play, tmp_path: Path) -> None:
    routed = passes()
    trace = read_trace(dumped(play, tmp_path / "dumps", "per_token", routed))
    assert isinstance(trace, RoutingTrace)
    assert (trace.unit, trace.layers, trace.top_k) == (TraceUnit.STEP, (0, 1, 2), TOP_K)
    assert (trace.experts, trace.experts_known) == (EXPERTS, True)
    parts = list(trace.parts())
    places = [(step, rank) for step in range(PASSES) for rank in range(RANKS)]
    assert [(part.step, part.rank) for part in parts] == places
    for part, (step, rank) in zip(parts, places, strict=True):
        assert np.array_equal(part.ids, routed[step][rank])
        assert part.prompt_tokens == len(part.ids)


def test_recorder_per_pass_reads_as_counts_of_all_ranks(play: Play, tmp_path: Path) -> None:
    routed = passes()
    trace = read_trace(dumped(play, tmp_path / "dumps", "per_pass", routed))
    assert isinstance(trace, CountsTrace)
    assert (trace.layers, trace.experts, trace.steps) == ((0, 1, 2), EXPERTS, PASSES)
    counts = np.concatenate(list(trace.blocks(1)))
    for step, of_ranks in enumerate(routed):
        for layer in range(LAYERS):
            ids = np.concatenate([ids[:, layer].ravel() for ids in of_ranks])
            assert np.array_equal(counts[step, layer], np.bincount(ids, minlength=EXPERTS))


def test_response_with_captured_experts_is_read(play: Play, tmp_path: Path) -> None:
    ids = random_ids(1, 7, LAYERS, TOP_K, EXPERTS)
    ids[:, 0] = 0  # a dense layer, which the capturer leaves at zero
    [response] = play("recorder:respond", 1, ids=ids.tolist())
    path = tmp_path / "response.json"
    path.write_text(json.dumps(response), encoding="utf-8")
    trace = read_trace(path, layers=LAYERS, top_k=TOP_K)
    assert isinstance(trace, RoutingTrace)
    (part,) = trace.parts()
    assert (trace.layers, part.prompt_tokens) == ((1, 2), 7)
    assert np.array_equal(part.ids, ids[:, 1:])
