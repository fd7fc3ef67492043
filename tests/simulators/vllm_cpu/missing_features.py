"""What the CPU build of vLLM cannot do by itself, and which of it is to be filled."""

import os
from collections.abc import Iterable
from enum import StrEnum

VARIABLE = "EQUIPOISE_VLLM_CPU"


class Hole(StrEnum):
    """One thing that the CPU build lacks; the module in parentheses fills it."""

    COLLECTIVES = "collectives"
    """`all_gatherv` and `reduce_scatterv`, and sends that return at once (`collectives`)."""
    EXPERT_MAP = "expert_map"
    """Experts that live on another rank (`experts`)."""
    RECEIVE_BUFFER = "receive_buffer"
    """Where a later stage of an eager pipeline puts what it receives (`worker`)."""
    RUNNER = "runner"
    """Triton, and so the model runner that GPUs have (`runner`)."""
    EPLB_SWITCH = "eplb_switch"
    """The setting that turns EPLB on (`platform`)."""
    EPLB_ROUTING = "eplb_routing"
    """Stock EPLB: from experts to slots, and the counts of load (`eplb.routing`)."""
    EPLB_STATE = "eplb_state"
    """Stock EPLB: the state, which the CPU's model runner does not make (`eplb.state`)."""
    EPLB_STREAMS = "eplb_streams"
    """Stock EPLB: streams and events of an accelerator (`eplb.streams`)."""


PARALLEL = frozenset({Hole.COLLECTIVES, Hole.EXPERT_MAP, Hole.RECEIVE_BUFFER, Hole.EPLB_SWITCH})
"""What pipelines and expert parallelism need, whoever balances."""
STOCK_EPLB = frozenset({Hole.EPLB_ROUTING, Hole.EPLB_STATE, Hole.EPLB_STREAMS})
"""What vLLM's own balancer needs on top of it."""
SECOND_RUNNER = frozenset({Hole.RUNNER})
"""What the model runner of GPUs needs, which leaves `EPLB_STATE` and `RECEIVE_BUFFER` out."""


def named(holes: Iterable[Hole]) -> str:
    """The value of `EQUIPOISE_VLLM_CPU` that fills these."""
    return ",".join(sorted(holes))


def filled() -> frozenset[Hole]:
    """What `EQUIPOISE_VLLM_CPU` names. Raises `ValueError` for a name that is none."""
    words = os.environ.get(VARIABLE, "").split(",")
    return frozenset(Hole(word.strip()) for word in words if word.strip())
