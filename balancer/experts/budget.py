"""How bytes in flight are divided among families of layers."""

from collections.abc import Sequence

from equipoise.balancer.experts.expert_model import Family
from equipoise.hal.errors import EngineError


def divided(families: Sequence[Family], budget: int) -> tuple[int, ...]:
    """Staging buffers of each family, in at most `budget` bytes over all of them.

    What is in flight is what is staged, so that dividing the staging divides the budget, alike on
    every rank and without a word between engines. Everybody gets one buffer, without which nothing
    could move; the rest goes by bytes of slots, since who has more of them has more to move.
    Nobody gets more buffers than slots.

    Raises:
        EngineError: less than one buffer each.
    """
    least = sum(family.slot_bytes for family in families)
    if budget < least:
        raise EngineError(
            f"{budget} bytes of staging are not enough: one slot of each of {len(families)} "
            f"families takes {least}"
        )
    total = sum(family.nbytes for family in families)
    # A family of n slots has n * slot_bytes of total, and so that part of the rest: n / total slots
    # for each byte.
    return tuple(
        min(len(family.slots), 1 + (budget - least) * len(family.slots) // total)
        for family in families
    )
