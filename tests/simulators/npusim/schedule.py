"""Schedules of the simulated device: who runs next."""

from npusim.errors import Refused

SEEDED = ("delay", "explore")
PLAIN = ("eager", "lazy")


def parse(text: str, seed: int | None) -> str:
    """What NPUSIM_SCHEDULE says: `eager`, `lazy`, `delay:SEED` or `explore:SEED`.

    The seed stands in `text` behind a colon, or in `seed`; 0 by default. Raises `Refused`.
    """
    name, colon, seed_text = text.partition(":")
    if name not in PLAIN + SEEDED:
        raise Refused(f"no schedule is called {name!r}: eager, delay, lazy or explore")
    if name in PLAIN:
        if colon or seed is not None:
            raise Refused(f"the schedule {name} takes no seed")
        return name
    if colon and seed is not None:
        raise Refused("the seed is given twice")
    if colon and not seed_text.isdecimal():
        raise Refused(f"the seed {seed_text!r} is no whole number")
    number = int(seed_text) if colon else seed or 0
    if not 0 <= number < 2**64:
        raise Refused(f"the seed {number} is not in 0 to 2**64 - 1")
    return f"{name}:{number}"
