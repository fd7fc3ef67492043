"""Checks that all ranks have the same, before anything depends on it.

A difference would show later as rebalances that abort for ever, as hangs, or not at all: a row that
is sent to a rank that does not exist goes nowhere.
"""

import json
from collections.abc import Mapping, Sequence

from equipoise.balancer.experts.weights.expert_weights import format_ranges
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import AgreementLost

Values = Mapping[str, str]
"""What a rank has, by name."""
NOTHING = "nothing"
"""What a rank has that does not know the name."""


def check_same_on_all_ranks(
    control: ControlPlane,
    question: str,
    timeout: float,
    mine: Mapping[str, Values],
    ranks: Sequence[int] | None = None,
    told: str = "",
) -> tuple[str, ...]:
    """Compare what ranks have; collective among them.

    Args:
        control: on which they meet.
        question: asked once on it.
        timeout: seconds that the slowest of them may take.
        mine: what this rank has, by subject.
        ranks: who compares; all by default.
        told: what this rank tells the others besides, which may differ.

    Returns what each of them tells, in their order.

    Raises:
        AgreementLost: names the first thing that differs, and which ranks have which value; the
            same text on every rank.
        BallotIncomplete: a rank does not come.
    """
    ranks = range(control.size) if ranks is None else ranks
    control.cast(question, json.dumps([{of: dict(mine[of]) for of in mine}, told]).encode())
    heard = [json.loads(ballot) for ballot in control.collect(question, timeout, ranks)]
    sides: list[dict[str, dict[str, str]]] = [side for side, _ in heard]
    names = dict.fromkeys((of, name) for side in sides for of in side for name in side[of])
    for of, name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, side in zip(ranks, sides, strict=True):
            ranks_of.setdefault(side.get(of, {}).get(name, NOTHING), []).append(rank)
        if len(ranks_of) > 1:
            values = "; ".join(_has(some, value) for value, some in ranks_of.items())
            raise AgreementLost(f"{of}: ranks differ in {name}: {values}")
    return tuple(told for _, told in heard)


def _has(ranks: Sequence[int], value: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has {value}"
    return f"ranks {format_ranges(sorted(ranks))} have {value}"
