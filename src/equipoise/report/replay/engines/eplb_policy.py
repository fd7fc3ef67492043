"""Equipoise's policy within an engine: our plans, the engine's transfers and dispatch."""

import numpy as np

from equipoise.balancer.experts.placement import ExpertShape, Placement
from equipoise.integrations.vllm.eplb.policy_plan import plan_placement
from equipoise.integrations.vllm.settings import EplbPolicySettings
from equipoise.report.replay.engine_model import WindowLoad

NAME = "eplb_policy"
"""The feature of the plugins for vLLM and vllm-ascend."""


def plan_from_installed(load: WindowLoad, installed: Placement, shape: ExpertShape) -> Placement:
    """The next placement, int32 (layers, slots), by the plugins' own code and default settings."""
    plan = plan_placement(load.experts, shape, installed, EplbPolicySettings())
    return np.ascontiguousarray(plan.placement, dtype=np.int32)
