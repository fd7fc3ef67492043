"""The exploring schedule: its seed, or the bytes that steer it, decide the order."""

import re

import pytest
from devices.simulator.running import run_program
from npusim import steering

TURN = re.compile(r"stream \d+: turn of .*")


def order(seed: int, *choices: str) -> list[str]:
    """Which stream had a turn, one after another."""
    outcome = run_program("order", "explore", "--seed", str(seed), "--trace", arguments=choices)
    assert outcome.facts == {"done": True}
    return TURN.findall(outcome.err)


@pytest.mark.deep
def test_the_same_seed_gives_the_same_order() -> None:
    first, second = order(5), order(5)
    assert len(first) > 60
    assert first == second


@pytest.mark.deep
def test_other_seeds_give_other_orders() -> None:
    assert len({tuple(order(seed)) for seed in range(4)}) == 4


@pytest.mark.deep
def test_the_bytes_that_steer_it_decide_whatever_the_seed() -> None:
    choices = bytes(range(0, 250, 3)).hex()
    assert order(1, choices) == order(2, choices)
    assert order(1, choices) != order(1, "00")


def test_steering_says_where_no_simulated_driver_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steering, "LIBRARY", "libascendcl_of_nobody.so")
    with pytest.raises(RuntimeError, match="no simulated driver is loaded"):
        steering.steer(b"\0")
