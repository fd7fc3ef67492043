"""The lowest peak that any shares of a placement reach, by a flow of our own: exact, in integers.

Rows of an expert may go to the ranks that hold a copy of it, in any parts. A peak is reached
exactly when every row finds a rank: when the largest flow from experts through ranks, each of which
lets the peak pass, carries all rows. Where it does not, the experts on the near side of the least
cut hold too many rows for the ranks that they have: the peak is at least their rows over these
ranks, which is the next peak to try. The first one that holds is the optimum (Dinkelbach's way with
a ratio). scipy's linear program says the same; it is not wanted on the machine that has a device.
"""

from collections import deque
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Held = list[set[int]]
"""By expert, the ranks that hold it."""


def optimum(load: npt.NDArray[np.int64], placement: npt.NDArray[np.int32], ranks: int) -> float:
    """The lowest max/mean - 1 over ranks, for one layer.

    Args:
        load: (experts,), rows.
        placement: (slots,), the expert in each slot; slots are spread over ranks in order.
        ranks: how many; 0 is the answer where there are no rows.
    """
    rows = [int(count) for count in load]
    total = sum(rows)
    if total == 0:
        return 0.0
    held: Held = [set() for _ in rows]
    for slot, expert in enumerate(placement.tolist()):
        held[expert].add(slot * ranks // len(placement))
    peak = Fraction(total, ranks)
    while (crowded := _crowded(rows, held, ranks, peak)) is not None:
        peak = crowded
    return float(peak * ranks / total) - 1.0


def _crowded(rows: list[int], held: Held, ranks: int, peak: Fraction) -> Fraction | None:
    """The peak that some experts need by themselves, above `peak`; None where none do."""
    whole = [count * peak.denominator for count in rows]
    flow: list[dict[int, int]] = [{} for _ in range(ranks)]
    room = [peak.numerator] * ranks
    left = _filled(whole, held, flow, room)
    experts = _reached(left, held, flow, room)[0]
    if not any(left[expert] for expert in experts):
        return None
    places = set().union(*(held[expert] for expert in experts))
    return Fraction(sum(rows[expert] for expert in experts), len(places))


def _filled(whole: list[int], held: Held, flow: list[dict[int, int]], room: list[int]) -> list[int]:
    """Send as much as there is room for; what is left of each expert. `flow` and `room` change."""
    left = list(whole)
    for expert, places in enumerate(held):
        for rank in places:
            _send(expert, rank, min(left[expert], room[rank]), left, flow, room)
    while (path := _path(left, held, flow, room)) is not None:
        _push(path, left, flow, room)
    return left


def _send(
    expert: int, rank: int, size: int, left: list[int], flow: list[dict[int, int]], room: list[int]
) -> None:
    if size > 0:
        left[expert] -= size
        room[rank] -= size
        flow[rank][expert] = flow[rank].get(expert, 0) + size


Came = dict[int, tuple[int, int]]
"""By rank, how it was come to: from which rank, -1 from the beginning, by moving which expert."""


def _reached(
    left: list[int], held: Held, flow: list[dict[int, int]], room: list[int]
) -> tuple[set[int], Came, int | None]:
    """Experts that rows left over lead to, how ranks were come to, and one of these with room."""
    experts = {expert for expert, rest in enumerate(left) if rest}
    came: Came = {}
    queue = deque((-1, expert) for expert in sorted(experts))
    while queue:
        origin, expert = queue.popleft()
        for rank in sorted(held[expert]):
            if rank in came or rank == origin:
                continue
            came[rank] = origin, expert
            if room[rank] > 0:
                return experts, came, rank
            for other, size in flow[rank].items():
                if size > 0 and other not in experts:
                    experts.add(other)
                    queue.append((rank, other))
    return experts, came, None


def _path(
    left: list[int], held: Held, flow: list[dict[int, int]], room: list[int]
) -> list[tuple[int, int, int]] | None:
    """Moves (expert, from rank, to rank) that make room, the last one first; None: no room."""
    _, came, end = _reached(left, held, flow, room)
    if end is None:
        return None
    moves = []
    while end != -1:
        origin, expert = came[end]
        moves.append((expert, origin, end))
        end = origin
    return moves


def _push(
    moves: list[tuple[int, int, int]], left: list[int], flow: list[dict[int, int]], room: list[int]
) -> None:
    """As much as fits along a path."""
    first = moves[-1][0]
    inner = [flow[origin][expert] for expert, origin, _ in moves if origin != -1]
    size = min(left[first], room[moves[0][2]], *inner)
    left[first] -= size
    room[moves[0][2]] -= size
    for expert, origin, rank in moves:
        flow[rank][expert] = flow[rank].get(expert, 0) + size
        if origin != -1:
            flow[origin][expert] -= size
