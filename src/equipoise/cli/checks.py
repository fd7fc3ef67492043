"""One thing that `equipoise doctor` has looked at."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """Something that is so or is not; `detail` says what, or what would help.

    `passed` is None where it cannot be had, whatever is done about it, and `detail` says why.
    """

    name: str
    passed: bool | None
    detail: str
