"""Who moves next: bytes that somebody else drew."""


class Schedule:
    """Choices taken from bytes, one each; when they are used up, always the first."""

    __slots__ = ("_choices", "_taken")

    def __init__(self, choices: bytes) -> None:
        self._choices = choices
        self._taken = 0

    def choose(self, count: int) -> int:
        """In [0, count). A choice among one costs no byte, so that none is wasted."""
        if count < 2 or self._taken >= len(self._choices):
            return 0
        self._taken += 1
        return self._choices[self._taken - 1] % count
