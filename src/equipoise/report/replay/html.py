"""The page of `equipoise replay`."""

from equipoise.report.replay.replay import Replay


def page(replay: Replay, command: str) -> str:
    """The page."""
    raise NotImplementedError
