"""Every system of the benchmark serves the same tokens rightly, on four real processes."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SECONDS = 120.0
sys.path.insert(0, str(BENCHMARKS))
try:
    emulation, crew, rank = (
        importlib.import_module(name) for name in ("emulation", "engine_crew", "engine_rank")
    )
finally:
    sys.path.remove(str(BENCHMARKS))
SYSTEMS = tuple(rank.SYSTEMS)


@pytest.fixture(scope="module")
def served() -> dict[str, list[dict[str, Any]]]:
    """What each rank wrote down, by system; nothing is emulated."""
    point = emulation.raw(replace(emulation.CENTRE, stages=1))
    runs = [crew.Run(point, system, 0) for system in SYSTEMS]
    return dict(zip(SYSTEMS, crew.serve_all(runs, SECONDS), strict=True))


@pytest.mark.parametrize("system", SYSTEMS)
def test_rows_find_their_expert_in_every_step(
    served: dict[str, list[dict[str, Any]]], system: str
) -> None:
    assert [told["wrong"] for told in served[system]] == [0] * emulation.RANKS


@pytest.mark.parametrize("system", SYSTEMS)
def test_ranks_install_the_same_layouts(
    served: dict[str, list[dict[str, Any]]], system: str
) -> None:
    assert len({tuple(told["layouts"]) for told in served[system]}) == 1


def test_all_systems_are_given_the_same_tokens(served: dict[str, list[dict[str, Any]]]) -> None:
    tokens = [[told["tokens"] for told in ranks] for ranks in served.values()]
    assert all(given == tokens[0] for given in tokens)
    assert len(set(tokens[0])) == emulation.RANKS


@pytest.mark.parametrize("system", ["stop-the-world", "one layer a step", "boundary", "locked"])
def test_systems_that_are_compared_execute_the_same_plans_in_order(
    served: dict[str, list[dict[str, Any]]], system: str
) -> None:
    told = served[system][0]
    assert told["plans"] == served["perfect"][0]["plans"]
    done = [digest for digest in told["layouts"] if digest in told["plans"]]
    assert done == told["plans"][: len(done)]
    assert len(done) >= len(told["rebalances"]) > 0


def test_without_balancing_nothing_is_installed(served: dict[str, list[dict[str, Any]]]) -> None:
    for system in ("none", "none again"):
        assert len(served[system][0]["layouts"]) == 1
        assert served[system][0]["rebalances"] == []


def test_a_rank_that_fails_ends_all_and_is_quoted() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'no such system'"):
        crew.serve_all([crew.Run(emulation.CENTRE, "no such system", 0)], SECONDS)
