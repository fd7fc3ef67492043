"""What a run is asked to do."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from equipoise.balancer.experts.config import CommitMode
from equipoise.balancer.experts.config import ShareMode as Shares
from equipoise.balancer.formats.iterations import Iterations

__all__ = ["Balance", "CommitMode", "Recording", "RunSettings", "Shares", "staging_buffers"]


class Balance(StrEnum):
    """Whether the run balances, or only shows what happens without."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One `equipoise run`; every field is also an option and a key of the configuration file.

    `slots` counts physical experts per layer over all ranks, `window_size` and `step_interval`
    are steps (vLLM's words), `deadline` is seconds. An empty `text` means the shipped samples, and
    an empty `communicator` the one that goes with the backend. A `placement` is a file of the one
    that is served unchanged. Rank r serves metrics on `metrics_port` + r, where there is one.
    """

    ranks: int = 4
    backend: str = "cpu"
    communicator: str = ""
    steps: int = 120
    text: tuple[Path, ...] = ()
    slots: int = 40
    shares: Shares = Shares.EXACT
    commit: CommitMode = CommitMode.BOUNDARY
    balance: Balance = Balance.ON
    placement: Path | None = None
    window_size: int = 4
    step_interval: int = 8
    deadline: float = 20.0
    seed: int = 0
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"
    wandb: str = ""
    log_epochs: bool = False
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    out: Path = Path("equipoise-run")


@dataclass(frozen=True)
class Recording:
    """What every rank writes of its counts: which steps, into which folder."""

    folder: Path
    steps: Iterations


LAYERS_IN_FLIGHT = 2
"""Staging is enough for so many layers of which every slot changes."""


def staging_buffers(run: RunSettings) -> int:
    """Of a rank that balances; none where weights are written in place."""
    if run.commit is CommitMode.LOCKED:
        return 0
    return LAYERS_IN_FLIGHT * run.slots // run.ranks
