"""The random numbers of csrc/common/random.h, and lengths of outputs, in plain Python."""

from math import cos, log, pi, sqrt

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
REFRESH = 32
"""Up to so many outputs each is known at once, later ones in lots of so many."""


def mix64(x: int) -> int:
    """As `hal/checksum.py` defines it."""
    x ^= x >> 32
    x = x * 0xC92A4895548C7445 & MASK
    x ^= x >> 29
    x = x * 0xB33D02297CFAF58D & MASK
    return x ^ x >> 32


class Dice:
    """A counter, mixed."""

    def __init__(self, seed: int) -> None:
        self.state = mix64(seed + STEP & MASK)

    def next(self) -> int:
        self.state = self.state + STEP & MASK
        return mix64(self.state)

    def below(self, sides: int) -> int:
        return self.next() * sides >> 64

    def uniform(self) -> float:
        return (self.next() >> 11) * 2.0**-53

    def normal(self) -> float:
        radius = sqrt(-2 * log(1 - self.uniform()))
        return radius * cos(2 * pi * self.uniform())


class SlowLengths:
    """Outputs that have ended."""

    def __init__(self) -> None:
        self.output_lengths: list[int] = []

    def add(self, length: int) -> None:
        self.output_lengths.append(length)

    @property
    def known(self) -> list[int]:
        count = len(self.output_lengths)
        return self.output_lengths[: count if count <= REFRESH else count // REFRESH * REFRESH]

    def longer(self, length: int) -> int:
        return sum(output > length for output in self.known)

    def survival(self, age: int, ahead: int) -> tuple[int, int]:
        """P(output > age + ahead | output > age), as a fraction; 0 where nobody came so far."""
        now = self.longer(age)
        return (self.longer(age + ahead), now) if now else (0, 1)

    def remaining(self, age: int, horizon: int) -> float:
        """E[min(output - age, horizon) | output > age]; 1 where nobody came so far."""
        remainders = [min(output - age, horizon) for output in self.known if output > age]
        return sum(remainders) / len(remainders) if remainders else 1.0

    def quantile(self, share: float) -> int:
        """The smallest length that at least this part of the outputs does not exceed."""
        count, length = len(self.known), 0
        while self.longer(length) > count * (1 - share):
            length += 1
        return length
