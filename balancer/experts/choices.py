"""What a plan can be asked for by name."""

from enum import StrEnum
from typing import TypeVar

from equipoise.hal.errors import PlacementError

Choice = TypeVar("Choice", bound=StrEnum)


class Policy(StrEnum):
    """How to plan."""

    GREEDY = "greedy"
    """Anew, by the rule that DeepSeek's EPLB and TensorRT-LLM publish."""
    CONNECTED = "connected"
    """Anew, so that the copies connect all ranks and shares can level any batch."""
    INCREMENTAL = "incremental"
    """From what is installed, moving as little as the target allows."""


class Objective(StrEnum):
    """What is to be equal on all ranks."""

    TOKENS = "tokens"
    """Rows: what compute-bound phases wait for."""
    ACTIVE_EXPERTS = "active_experts"
    """Experts that have any rows: what memory-bound decoding waits for.

    Source: METRO, arXiv 2512.09277.
    """


class Split(StrEnum):
    """How rows are divided among the copies of an expert."""

    LEVEL = "level"
    """By shares that level the ranks."""
    EVEN = "even"
    """All copies alike: for engines that know no shares."""


def one_of(kind: type[Choice], name: str, value: str) -> Choice:
    """The choice of that value; `name` is what it is for. Raises `PlacementError`."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise PlacementError(f"{name} must be one of {known}, got {value!r}") from None
