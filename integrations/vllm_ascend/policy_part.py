"""Our placement policy in vllm-ascend's own balancer, and in vLLM's, where a release uses that."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from equipoise.integrations.vllm import policy_part
from equipoise.integrations.vllm.patching import Patch, apply, undo
from equipoise.integrations.vllm.settings import PolicySettings
from equipoise.integrations.vllm_ascend.policy import LOG, TablePolicy
from equipoise.integrations.vllm_ascend.tally import Tally

FACTORY = "vllm_ascend.eplb.core.policy.policy_factory"


@contextmanager
def installed(settings: PolicySettings, tally: Tally) -> Iterator[None]:
    """Have runners that are made within the context planned for by us.

    A runner asks the factory once, and forks the process that plans; so this comes before the
    runner, and before any thread of ours.
    """
    patches = (Patch(FACTORY, "PolicyFactory.generate_policy", _ours(settings, tally)),)
    with policy_part.installed(settings):
        undo(patches)  # a worker before this one in the process may not have been shut down
        apply(patches)
        try:
            yield
        finally:
            undo(patches)


def _ours(settings: PolicySettings, tally: Tally) -> Callable[[Any], Any]:
    def make(stock: Callable[[int], Any]) -> Callable[[int], TablePolicy]:
        @wraps(stock)
        def generate_policy(policy_type: int) -> TablePolicy:
            level = _level()
            LOG.log(level, "equipoise policy plans in place of eplb_policy_type %s", policy_type)
            return TablePolicy(settings, tally, level)

        return generate_policy

    return make


def _level() -> int:
    """All ranks of a group plan the same: the first tells it."""
    from vllm.distributed.parallel_state import get_ep_group

    try:
        first = get_ep_group().rank_in_group == 0
    except AssertionError:  # no group: called by hand
        first = True
    return logging.INFO if first else logging.DEBUG
