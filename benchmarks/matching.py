"""Which copy runs an expert in a batch, so that no rank runs more experts than it must."""

from collections.abc import Sequence

Homes = Sequence[Sequence[int]]
"""The ranks that hold a copy, of each expert that is active."""


def matched(homes: Homes, ranks: int) -> list[int]:
    """The rank that runs each expert; no other choice has a smaller largest rank.

    Experts with fewest copies choose first, each the rank that runs fewest so far (the greedy rule
    of METRO, arXiv 2512.09277); then chains of experts move over while that empties the fullest
    rank (augmenting paths, which make it exact).
    """
    runs: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(range(len(homes)), key=lambda e: (len(homes[e]), e)):
        runs[min(homes[expert], key=lambda rank: (len(runs[rank]), rank))].append(expert)
    while _relieve(runs, homes):
        pass
    chosen = [0] * len(homes)
    for rank, experts in enumerate(runs):
        for expert in experts:
            chosen[expert] = rank
    return chosen


def _relieve(runs: list[list[int]], homes: Homes) -> bool:
    """Take one expert off every fullest rank, if each of them can pass one on; returns whether."""
    most = max(len(experts) for experts in runs)
    for rank, experts in enumerate(runs):
        if len(experts) == most and not _pass_on(rank, most, runs, homes, {rank}):
            return False
    return most > 0


def _pass_on(rank: int, most: int, runs: list[list[int]], homes: Homes, seen: set[int]) -> bool:
    """Move one expert of `rank` on, so that no other rank comes to run `most`."""
    for expert in list(runs[rank]):
        for other in homes[expert]:
            if other in seen:
                continue
            seen.add(other)
            if len(runs[other]) + 1 < most or _pass_on(other, most, runs, homes, seen):
                runs[rank].remove(expert)
                runs[other].append(expert)
                return True
    return False
