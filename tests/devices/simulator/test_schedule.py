"""How a schedule and its seed are written."""

import pytest
from npusim.errors import Refused
from npusim.schedule import parse


@pytest.mark.parametrize(
    ("text", "seed", "parsed"),
    [
        ("eager", None, "eager"),
        ("lazy", None, "lazy"),
        ("delay", None, "delay:0"),
        ("delay:7", None, "delay:7"),
        ("explore", 7, "explore:7"),
        ("explore", 2**64 - 1, f"explore:{2**64 - 1}"),
    ],
)
def test_schedule_parse_includes_seed(text: str, seed: int | None, parsed: str) -> None:
    assert parse(text, seed) == parsed


@pytest.mark.parametrize(
    ("text", "seed", "message"),
    [
        ("", None, "no schedule is called ''"),
        ("quick", None, "no schedule is called 'quick'"),
        ("lazy", 3, "takes no seed"),
        ("eager:3", None, "takes no seed"),
        ("delay:3", 3, "twice"),
        ("delay:x", None, "no whole number"),
        ("delay", -1, "is not in 0 to"),
        ("explore", 2**64, "is not in 0 to"),
    ],
)
def test_schedule_parse_refuses_invalid_text(text: str, seed: int | None, message: str) -> None:
    with pytest.raises(Refused, match=message):
        parse(text, seed)
