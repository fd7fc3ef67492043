"""Faults to plant in vLLM, each of which has to show in the tokens."""

import os
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from typing import Any

VARIABLE = "EQUIPOISE_VLLM_FAULT"
PLANTED = "planted in vLLM: {}"
DROPPED_CHANGE = 3
"""Which of the layers with something to move loses its move."""


class Fault(StrEnum):
    """What is broken on purpose."""

    DROPPED_COPY = "dropped_copy"
    """The rows of one layer stay where they are, while its new map is installed."""
    SKIPPED_WAIT = "skipped_wait"
    """A stage computes on what it is still receiving."""
    OUR_DROPPED_COPY = "our_dropped_copy"
    """Our engine leaves slots as they are, while its tables say otherwise."""
    OUR_SKIPPED_WAIT = "our_skipped_wait"
    """Our channel hands out what it is still receiving."""
    OUR_OWN_PICKS = "our_own_picks"
    """Ranks that route the same rows pick replicas each in its own way."""


def planted() -> Fault | None:
    """What `EQUIPOISE_VLLM_FAULT` names. Raises `ValueError` for a name that is none."""
    word = os.environ.get(VARIABLE, "")
    return Fault(word) if word else None


def plant(fault: Fault | None) -> None:
    """Break vLLM in this process, and say so: a fault that was not planted proves nothing."""
    match fault:
        case Fault.DROPPED_COPY:
            _drop_a_copy()
        case Fault.SKIPPED_WAIT:
            _skip_waits()
        case None:
            return
        case _:
            _break_ours(fault)
    print(PLANTED.format(fault), file=sys.stderr, flush=True)


def _drop_a_copy() -> None:
    from vllm.distributed.eplb import eplb_state, rebalance_execute

    if hasattr(rebalance_execute.move_from_buffer, "__wrapped__"):
        return
    dropping = _dropping(rebalance_execute.move_from_buffer)
    rebalance_execute.move_from_buffer = dropping
    eplb_state.move_from_buffer = dropping


def _dropping(stock: Callable[..., None]) -> Callable[..., None]:
    change_count = 0

    @wraps(stock)
    def move(*arguments: Any, **keywords: Any) -> None:
        nonlocal change_count
        metadata = keywords["transfer_metadata"]
        change_count += 0 if metadata.is_unchanged.all() else 1
        if change_count != DROPPED_CHANGE:
            stock(*arguments, **keywords)
        else:
            change_count += 1

    return move


def _break_ours(fault: Fault) -> None:
    """Parts of Equipoise are imported where they are broken, and nowhere else."""
    from equipoise.backends.cpu.slots import CpuSlotStore
    from equipoise.integrations.vllm.eplb import state
    from equipoise.pipeline.channel.recv import PendingMessage

    match fault:
        case Fault.OUR_DROPPED_COPY:
            CpuSlotStore.commit = lambda *_: None  # type: ignore[method-assign]
        case Fault.OUR_SKIPPED_WAIT:
            PendingMessage.wait_on_host = lambda *_: None  # type: ignore[method-assign]
        case Fault.OUR_OWN_PICKS:
            setattr(state, "ranks_sharing_rows", lambda *_: 1)  # noqa: B010 - not exported


def _skip_waits() -> None:
    from vllm.v1.worker.gpu_worker import AsyncIntermediateTensors

    def wait(self: Any) -> None:
        self._comm_waited = True

    AsyncIntermediateTensors.wait_for_comm = wait
