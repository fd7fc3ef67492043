"""Our placement policy in the engine's own balancer."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from equipoise.integrations.vllm.patching import MARK
from equipoise.integrations.vllm.settings import PolicySettings

POLICIES = "vllm.distributed.eplb.policy"
NAME = "default"
"""The only policy that the engine's configuration takes."""


@contextmanager
def installed(settings: PolicySettings) -> Iterator[None]:
    """Have models that are loaded within the context planned for by us."""
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    from equipoise.integrations.vllm.policy import policy_class

    restore()
    stock = EPLB_POLICIES[NAME]
    ours = policy_class(settings, stock)
    setattr(ours, MARK, stock)
    EPLB_POLICIES[NAME] = ours
    try:
        yield
    finally:
        restore()


def restore() -> None:
    """Put back what ours has replaced, if it has: a policy of somebody else's stays."""
    loaded: Any = sys.modules.get(POLICIES)
    policies = {} if loaded is None else loaded.EPLB_POLICIES
    stock = getattr(policies.get(NAME), MARK, None)
    if stock is not None:
        policies[NAME] = stock
