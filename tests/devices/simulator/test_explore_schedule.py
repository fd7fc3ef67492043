"""The exploring schedule: its seed, or the bytes that steer it, decide the order."""

import re

import pytest
from devices.simulator.simulated_program import run_program
from npusim import steering

TURN = re.compile(r"stream \d+: turn of .*")


def order(seed: int, *choices: str) -> list[str]:
    """Which stream had a turn, one after another."""
    outcome = run_program(
        "stream_order", "explore", "--seed", str(seed), "--trace", arguments=choices
    )
    assert outcome.facts == {"done": True}
    return TURN.findall(outcome.err)


@pytest.mark.deep
def test_explore_schedule_repeats_order_for_same_seed() -> None:
    first, second = order(5), order(5)
    assert len(first) > 60
    assert first == second


@pytest.mark.deep
def test_explore_schedule_orders_differ_between_seeds() -> None:
    assert len({tuple(order(seed)) for seed in range(4)}) == 4


@pytest.mark.deep
def test_explore_schedule_follows_steering_bytes_over_seed() -> None:
    choices = bytes(range(0, 250, 3)).hex()
    assert order(1, choices) == order(2, choices)
    assert order(1, choices) != order(1, "00")


def test_steer_raises_without_simulated_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steering, "LIBRARY", "libascendcl_of_nobody.so")
    with pytest.raises(RuntimeError, match="no simulated driver is loaded"):
        steering.steer(b"\0")
