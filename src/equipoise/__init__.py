"""Keeps Mixture-of-Experts serving in balance on any accelerator.

Importing this package imports neither torch nor a vendor's module, initialises no device and starts
no thread: a name is imported with its first use. What is promised: docs/design/api.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.backend_check import check_backend as check_backend
    from equipoise.balancer.experts.config import BalancerConfig as BalancerConfig
    from equipoise.balancer.experts.config import PlannerOptions as PlannerOptions
    from equipoise.balancer.experts.config import ShareMode as ShareMode
    from equipoise.balancer.experts.model_balancer import ModelBalancer as ModelBalancer
    from equipoise.balancer.experts.placement import ExpertShape as ExpertShape
    from equipoise.balancer.experts.placement import initial_placement as initial_placement
    from equipoise.balancer.experts.planning.planner import Plan as Plan
    from equipoise.balancer.experts.planning.planner import plan as plan
    from equipoise.balancer.experts.runtime import events as events
    from equipoise.balancer.experts.weights.registry import ModelRegistry as ModelRegistry
    from equipoise.balancer.formats.placement import ExpertPlacement as ExpertPlacement
    from equipoise.balancer.formats.read_write import read_placement as read_placement
    from equipoise.balancer.formats.read_write import read_statistics as read_statistics
    from equipoise.balancer.formats.read_write import write_placement as write_placement
    from equipoise.balancer.formats.read_write import write_statistics as write_statistics
    from equipoise.balancer.formats.statistics import ExpertStatistics as ExpertStatistics
    from equipoise.balancer.requests.policy import Assignment as Assignment
    from equipoise.balancer.requests.policy import Capacity as Capacity
    from equipoise.balancer.requests.policy import Decision as Decision
    from equipoise.balancer.requests.policy import Request as Request
    from equipoise.balancer.requests.policy import RoutingPolicy as RoutingPolicy
    from equipoise.balancer.requests.policy import WorkerChange as WorkerChange
    from equipoise.balancer.requests.policy import WorkerReport as WorkerReport
    from equipoise.balancer.requests.policy import WorkerState as WorkerState
    from equipoise.balancer.requests.policy_settings import (
        RoutingPolicySettings as RoutingPolicySettings,
    )
    from equipoise.balancer.requests.request_router import RequestRouter as RequestRouter
    from equipoise.channel import TensorChannel as TensorChannel
    from equipoise.connection import Connection as Connection
    from equipoise.connection import connect as connect
    from equipoise.hal.errors import EquipoiseError as EquipoiseError
    from equipoise.opening import open_balancer as open_balancer
    from equipoise.pipeline.all_to_all.variable_size import (
        VariableSizeExchange as VariableSizeExchange,
    )
    from equipoise.pipeline.intermediate_tensors import (
        AsyncIntermediateTensors as AsyncIntermediateTensors,
    )

__version__ = "0.1.0"

__all__ = [
    "Assignment",
    "AsyncIntermediateTensors",
    "BalancerConfig",
    "Capacity",
    "Connection",
    "Decision",
    "EquipoiseError",
    "ExpertPlacement",
    "ExpertShape",
    "ExpertStatistics",
    "ModelBalancer",
    "ModelRegistry",
    "Plan",
    "PlannerOptions",
    "Request",
    "RequestRouter",
    "RoutingPolicy",
    "RoutingPolicySettings",
    "ShareMode",
    "TensorChannel",
    "VariableSizeExchange",
    "WorkerChange",
    "WorkerReport",
    "WorkerState",
    "check_backend",
    "connect",
    "events",
    "initial_placement",
    "open_balancer",
    "plan",
    "read_placement",
    "read_statistics",
    "write_placement",
    "write_statistics",
]
_HOMES = {
    "backend_check": ("check_backend",),
    "balancer.experts.config": (
        "BalancerConfig",
        "PlannerOptions",
        "ShareMode",
    ),
    "balancer.experts.model_balancer": ("ModelBalancer",),
    "balancer.experts.placement": (
        "ExpertShape",
        "initial_placement",
    ),
    "balancer.experts.planning.planner": (
        "Plan",
        "plan",
    ),
    "balancer.experts.weights.registry": ("ModelRegistry",),
    "balancer.formats.placement": ("ExpertPlacement",),
    "balancer.formats.read_write": (
        "read_placement",
        "read_statistics",
        "write_placement",
        "write_statistics",
    ),
    "balancer.formats.statistics": ("ExpertStatistics",),
    "balancer.requests.policy": (
        "Assignment",
        "Capacity",
        "Decision",
        "Request",
        "RoutingPolicy",
        "WorkerChange",
        "WorkerReport",
        "WorkerState",
    ),
    "balancer.requests.policy_settings": ("RoutingPolicySettings",),
    "balancer.requests.request_router": ("RequestRouter",),
    "channel": ("TensorChannel",),
    "connection": (
        "Connection",
        "connect",
    ),
    "hal.errors": ("EquipoiseError",),
    "opening": ("open_balancer",),
    "pipeline.all_to_all.variable_size": ("VariableSizeExchange",),
    "pipeline.intermediate_tensors": ("AsyncIntermediateTensors",),
}
"""Module by module, the names that are exported."""
_MODULE = {name: module for module, names in _HOMES.items() for name in names}
_EVENTS = "balancer.experts.runtime.events"
"""The one name that is a module: its classes are only ever used together."""


def install_command(extra: str) -> str:
    """What brings an optional part, for people.

    No package index has this package: under its name there would be somebody else's.
    """
    return f"pip install '.[{extra}]' in a clone of equipoise"


def __getattr__(name: str) -> object:
    """Import an exported name from its module."""
    if name == "events":
        return import_module(f"equipoise.{_EVENTS}")
    if name not in _MODULE:
        raise AttributeError(f"module 'equipoise' has no attribute {name!r}{_hint(name)}")
    try:
        module = import_module(f"equipoise.{_MODULE[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"equipoise.{name} needs torch: {install_command('torch')}", name="torch"
        ) from error
    return getattr(module, name)


def _hint(name: str) -> str:
    """The nearest exported name, if one is near."""
    from difflib import get_close_matches

    near = get_close_matches(name, __all__, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def __dir__() -> list[str]:
    """What can be imported."""
    return sorted([*__all__, "__version__"])
