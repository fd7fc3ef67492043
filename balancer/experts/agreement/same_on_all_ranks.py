"""Compares values of all ranks before anything depends on their being equal.

A difference would otherwise show as rebalances that always abort, as a hang, or not at all: a row
that is sent to a rank that does not exist is lost.
"""

import json
from collections.abc import Mapping, Sequence

from equipoise.balancer.experts.placement import format_ranges
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import RanksDiffer

Values = Mapping[str, str]
"""Values of a rank, by name."""
UNKNOWN_VALUE = "nothing"
"""The value of a rank that does not know the name."""


def check_same_on_all_ranks(
    control: ControlPlane,
    key: str,
    timeout: float,
    own_values: Mapping[str, Values],
    ranks: Sequence[int] | None = None,
    note: str = "",
) -> tuple[str, ...]:
    """Compares the values of all ranks; collective among them.

    Args:
        control: the control plane on which values are exchanged.
        key: a key that is used once.
        timeout: seconds to wait for the slowest rank.
        own_values: values of this rank, by subject.
        ranks: the ranks that compare; all by default.
        note: a text for the other ranks that may differ between ranks.

    Returns:
        The notes of all ranks, in their order.

    Raises:
        RanksDiffer: names the first value that differs, and which ranks have which value; the
            text is the same on every rank.
        BallotIncomplete: a rank did not take part in time.
    """
    ranks = range(control.size) if ranks is None else ranks
    own = {subject: dict(own_values[subject]) for subject in own_values}
    control.cast(key, json.dumps([own, note]).encode())
    ballots = [json.loads(ballot) for ballot in control.collect(key, timeout, ranks)]
    by_rank: list[dict[str, dict[str, str]]] = [values for values, _ in ballots]
    names = dict.fromkeys(
        (subject, name) for values in by_rank for subject in values for name in values[subject]
    )
    for subject, name in names:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, values in zip(ranks, by_rank, strict=True):
            ranks_by_value.setdefault(values.get(subject, {}).get(name, UNKNOWN_VALUE), []).append(
                rank
            )
        if len(ranks_by_value) > 1:
            differences = "; ".join(_has(having, value) for value, having in ranks_by_value.items())
            raise RanksDiffer(f"{subject}: ranks differ in {name}: {differences}")
    return tuple(note for _, note in ballots)


def _has(ranks: Sequence[int], value: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has {value}"
    return f"ranks {format_ranges(sorted(ranks))} have {value}"
