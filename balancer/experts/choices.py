"""What a plan can be asked for by name."""

from enum import StrEnum
from typing import TypeVar

from equipoise.hal.errors import PlacementError

Choice = TypeVar("Choice", bound=StrEnum)

SIGMA_WINDOWS = 8
"""Windows from which on they say well enough how load varies: a deviation of seven numbers is known
to a third of itself at best."""
SIGMA = 1.0
"""Standard deviations that a rank counts with by default where there are so many windows: a plan
for their sum alone levels the sum, and no batch."""


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


def default_sigma(windows: int, policy: str, objective: str) -> float:
    """Standard deviations that a plan counts with where nobody says how many.

    Args:
        windows: of load that the plan is made from.
        policy: a `Policy`; greedy has no use for deviations.
        objective: an `Objective`; where active experts are planned for, windows are batches, each
            with 0 or 1 for an expert, and their sum is planned for.
    """
    uses_deviations = policy != Policy.GREEDY and objective == Objective.TOKENS
    return SIGMA if uses_deviations and windows >= SIGMA_WINDOWS else 0.0


def one_of(kind: type[Choice], name: str, value: str) -> Choice:
    """The choice of that value; `name` is what it is for. Raises `PlacementError`."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise PlacementError(f"{name} must be one of {known}, got {value!r}") from None
