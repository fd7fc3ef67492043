"""Faults to plant in a process, each of which has to show in what stages compute."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from typing import Any
from unittest.mock import patch

POLICY = "equipoise.integrations.vllm_ascend.eplb_policy.AscendEplbPolicy"


class Fault(StrEnum):
    """What is broken on purpose."""

    NONE = "none"
    SKIPPED_WAIT = "skipped_wait"
    """Our channel hands out what it is still receiving."""
    THEIR_SKIPPED_WAIT = "their_skipped_wait"
    """The stage reads what nobody has waited for."""
    DROPPED_COPY = "dropped_copy"
    """Our channel sends a message that nothing was packed into."""
    SHUFFLED_RANK = "shuffled_rank"
    """Our policy lets experts that stay on a rank change their slots."""
    DOUBLED_EXPERT = "doubled_expert"
    """It gives a rank an expert twice."""
    FAILING_POLICY = "failing_policy"
    """It raises."""


HANDOVER = Fault.SKIPPED_WAIT, Fault.THEIR_SKIPPED_WAIT, Fault.DROPPED_COPY
"""Those of a pipeline."""
PLANS = Fault.SHUFFLED_RANK, Fault.DOUBLED_EXPERT
"""Those of plans that vllm-ascend's planner must reject."""


def _nothing(*_: Any, **__: Any) -> None:
    """In the place of what would do something."""


def _shuffled(self: Any, snapshot: Any) -> Any:
    return 1, None, snapshot.to_tables(snapshot.installed)[:, :, ::-1].copy()


def _doubled(self: Any, snapshot: Any) -> Any:
    tables = snapshot.to_tables(snapshot.installed)
    tables[:, :, 0] = tables[:, :, 1]
    return 1, None, tables


def _mark_waited(tensors: Any) -> None:
    tensors._comm_waited = True


def _nothing_of_that_kind(*_: Any) -> Any:
    raise ValueError("planted")


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Break it until the context ends."""
    replaced: dict[Fault, tuple[str, Any]] = {
        Fault.SKIPPED_WAIT: (
            "equipoise.pipeline.channel.recv.PendingMessage.wait_on_host",
            _nothing,
        ),
        Fault.THEIR_SKIPPED_WAIT: (
            "vllm.v1.worker.gpu_worker.AsyncIntermediateTensors.wait_for_comm",
            _mark_waited,
        ),
        Fault.DROPPED_COPY: ("equipoise.pipeline.channel.send.pack", _nothing),
        Fault.SHUFFLED_RANK: (f"{POLICY}._plan", _shuffled),
        Fault.DOUBLED_EXPERT: (f"{POLICY}._plan", _doubled),
        Fault.FAILING_POLICY: (f"{POLICY}._plan", _nothing_of_that_kind),
    }
    with ExitStack() as patches:
        if fault in replaced:
            target, instead = replaced[fault]
            patches.enter_context(patch(target, instead))
        yield
