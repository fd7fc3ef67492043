"""How bytes in flight are divided among families of layers."""

from collections.abc import Sequence

from equipoise.balancer.experts.expert_model import Family
from equipoise.hal.errors import EngineError


def divided(families: Sequence[Family], budget: int) -> tuple[int, ...]:
    """Staging buffers of each family, in at most `budget` bytes over all of them.

    What is in flight is what is staged, so that dividing the staging divides the budget, alike on
    every rank and without a word between engines. A layer is planned with as many buffers as its
    family has, so all families come up to the slots of a layer first, together: then no plan is
    short of staging. What is left goes by bytes of slots: it lets more layers move at once. No
    family gets more buffers than slots.

    Raises:
        EngineError: less than one buffer each.
    """
    least = sum(family.slot_bytes for family in families)
    if budget < least:
        raise EngineError(
            f"{budget} bytes of staging are not enough: one slot of each of {len(families)} "
            f"families takes {least}"
        )
    layers = [len(family.slots) // len(family.layers) for family in families]
    of_layers = sum(
        slots * family.slot_bytes for slots, family in zip(layers, families, strict=True)
    )
    if budget < of_layers:
        return tuple(min(slots, budget // least) for slots in layers)
    rest = max(1, sum(family.nbytes for family in families) - of_layers)
    return tuple(
        min(len(family.slots), slots + (budget - of_layers) * (len(family.slots) - slots) // rest)
        for slots, family in zip(layers, families, strict=True)
    )
