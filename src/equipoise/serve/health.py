"""Whether a worker is well: by what it answers when it is asked, with hysteresis."""

from dataclasses import dataclass, replace
from enum import Enum, unique

from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.settings import HealthSettings


@unique
class Seen(Enum):
    """What came of asking a worker once."""

    WELL = "well"
    UNWELL = "unwell"
    """It answered, and not well; or it did not, but goes on with what it has."""
    SILENT = "silent"
    """No answer, or nobody there."""


@dataclass(frozen=True)
class Health:
    """What is believed of a worker, and what speaks against it.

    Attributes:
        state: what the policy is told.
        well: good answers in a row.
        bad: questions without a good answer in a row.
        silent: questions without any answer in a row.
    """

    state: WorkerState
    well: int = 0
    bad: int = 0
    silent: int = 0

    def after(self, seen: Seen, settings: HealthSettings) -> "Health":
        """What is believed after another question."""
        match seen:
            case Seen.WELL:
                found = Health(self.state, well=self.well + 1)
            case Seen.UNWELL:
                found = Health(self.state, bad=self.bad + 1)
            case Seen.SILENT:
                found = Health(self.state, bad=self.bad + 1, silent=self.silent + 1)
        return replace(found, state=_state(found, settings))

    @property
    def doubtful(self) -> bool:
        """Whether what is seen and what is believed differ: it is asked again soon."""
        if self.state is WorkerState.SERVING:
            return self.bad > 0
        return self.well > 0 or (self.state is WorkerState.DRAINING and self.silent > 0)


UNKNOWN = Health(WorkerState.LOST)
"""What is believed before anybody has asked."""


def first(seen: Seen) -> Health:
    """The first answer is believed at once: there is nothing to hold on to."""
    match seen:
        case Seen.WELL:
            return Health(WorkerState.SERVING, well=1)
        case Seen.UNWELL:
            return Health(WorkerState.LOST, bad=1)  # it has nothing that it could drain
        case Seen.SILENT:
            return Health(WorkerState.LOST, bad=1, silent=1)


def _state(found: Health, settings: HealthSettings) -> WorkerState:
    if found.silent >= settings.lost_after:
        return WorkerState.LOST
    if found.bad >= settings.draining_after and found.state is WorkerState.SERVING:
        return WorkerState.DRAINING
    if found.well >= settings.serving_after:
        return WorkerState.SERVING
    return found.state
