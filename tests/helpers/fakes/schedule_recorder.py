"""What a device that can be steered is steered by: remembers what it was told."""

TOLD: list[bytes] = []
"""The schedule of each case, in order."""


def steer(schedule: bytes) -> None:
    """Remember it."""
    TOLD.append(schedule)


def into_nothing(schedule: bytes) -> None:
    """There is nothing to steer."""
    raise OSError("the driver is not there")
