"""The parts of a worker: switched on before it loads its model, and off with it."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from equipoise.integrations.vllm import engine_part, handover, policy_part
from equipoise.integrations.vllm.settings import Settings


@dataclass(frozen=True)
class Parts:
    """What is switched on in one worker.

    Attributes:
        worker: the engine's.
        settings: what was asked for.
        opened: closes what was opened for it.
    """

    worker: Any
    settings: Settings
    opened: ExitStack

    def placement(self) -> list[list[int]] | None:
        """By layer, the expert in every slot; None where our engine is off."""
        return None if self.settings.engine is None else engine_part.placement(self.worker)

    def close(self) -> None:
        """Give back what was opened, the last first."""
        self.opened.close()


def enter(worker: Any, settings: Settings) -> Parts:
    """Switch on what belongs to a worker; the routing of requests is the front end's.

    Raises what a part raises; then none is on.
    """
    with ExitStack() as opened:
        leave(worker)
        if settings.policy is not None:
            opened.enter_context(policy_part.installed(settings.policy))
        if settings.engine is not None:
            opened.enter_context(engine_part.installed(worker, settings.engine))
        if settings.handover is not None:
            opened.enter_context(handover.installed(settings.handover, worker.device))
        return Parts(worker, settings, opened.pop_all())


def leave(worker: Any) -> None:
    """Nothing is asked for: an engine before this one in the process may have asked."""
    policy_part.restore()
