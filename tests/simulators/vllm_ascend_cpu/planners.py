"""Cases for a pool of ranks: vllm-ascend's planner, with the policy that its factory hands out."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Manager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.eplb.policy import EPLB_POLICIES
from vllm_ascend.eplb.core import eplb_worker
from vllm_ascend.eplb.core.eplb_utils import generate_global_placement
from vllm_ascend.eplb.core.policy import policy_factory

from equipoise.hal.communicator import Fabric
from vllm_ascend_cpu.faults import Fault, planted
from vllm_ascend_cpu.groups import Place, groups
from vllm_ascend_cpu.workers import counting, worker

TIMEOUT = 60.0
"""Seconds that the planner's process may take."""
BALANCING = {"eplb_config": {"dynamic_eplb": True}}
SWIFT = 2
"""vllm-ascend's default type of policy."""


class Planner:
    """In the place of a model runner: makes its planner as that does, in its constructor.

    Args:
        kind: of the policy that is asked for.
        tables: [layers, ranks, slots of a rank], what is installed.
    """

    def __init__(self, kind: int, tables: Tensor) -> None:
        # What is left of groups of earlier cases must not be freed in a process that is forked now:
        # gloo would join threads that it does not have.
        gc.collect()
        self._manager = Manager()
        first: dict[str, Tensor | None] = {"expert_maps": _maps(tables), "moe_load": None}
        self._shared = self._manager.dict(first)
        self._kind = kind
        self.ours = eplb_worker.EplbProcess(self._shared, policy_type=kind)
        self.process = self.ours._launch_process()

    @property
    def policy(self) -> Any:
        """That the factory handed out."""
        return self.ours.worker.policy

    @property
    def maps(self) -> Tensor:
        """What the planner has planned last, [layers, ranks, experts]: slot or -1."""
        expert_maps = self._shared["expert_maps"]
        assert expert_maps is not None
        return expert_maps

    def plan_there(self, load: Tensor) -> int:
        """Have its process plan for a load, [layers, ranks, slots of a rank]; layers answered."""
        self._shared["moe_load"] = load
        self.ours.planner_q.put(1)
        return len(self.ours.block_update_q.get(timeout=TIMEOUT))

    def plan_here(self, load: Tensor) -> list[str]:
        """The same in this process; what the planner's check said of the plan."""
        self._shared["moe_load"] = load
        messages: list[str] = []
        with _recorded_errors(messages):
            self.ours.worker.do_update()
        return messages

    def shutdown(self) -> None:
        """The worker calls it."""
        self.process.terminate()
        self.process.join(TIMEOUT)
        self._manager.shutdown()


def plan(
    fabric: Fabric,
    address: str,
    table: dict[str, int],
    loads: list[list[list[int]]],
    parts: dict[str, Any],
    where: str = "here",
    fault: str = Fault.NONE,
) -> dict[str, Any]:
    """Plan for each of `loads`, [layers][experts]; what came of it.

    Args:
        fabric: of the case, of one rank.
        address: see `Place`.
        table: ranks, experts, redundant: of vllm-ascend's first layout.
        loads: by cycle; an expert's load is divided evenly among its replicas.
        parts: that are switched on.
        where: `here`, in this process, or `there`, in the planner's.
        fault: name of a `Fault`.
    """
    first = generate_global_placement(table["experts"], table["ranks"], table["redundant"], 0)
    tables = [first.expand(len(loads[0]), -1, -1).to(torch.int64)]
    with (
        groups(Place(0, 1, address), equipoise=parts, **BALANCING) as config,
        counting() as read_counts,
        worker(config, 0, lambda *_: Planner(SWIFT, tables[0])) as ascend_worker,
        planted(Fault(fault)),
    ):
        messages = [_cycle(ascend_worker.model_runner, load, tables, where) for load in loads]
        return {
            "tables": [each.tolist() for each in tables],
            "said": messages,
            "policies": _policies(ascend_worker.model_runner.policy),
            "counted": read_counts(ascend_worker),
        }


def after(fabric: Fabric, address: str) -> list[str]:
    """The policies that are there when a worker with ours has been shut down."""
    with groups(Place(0, 1, address), equipoise={"eplb_policy": True}, **BALANCING) as config:
        with worker(config, 0, lambda *_: Planner(SWIFT, torch.tensor([[[0, 1]]]))):
            pass
        return _policies(policy_factory.PolicyFactory.generate_policy(SWIFT))


def _policies(handed_out: Any) -> list[str]:
    """Names of the policy that vllm-ascend's factory handed out, and of vLLM's own."""
    return [type(handed_out).__name__, EPLB_POLICIES["default"].__name__]


def _cycle(planner: Planner, load: list[list[int]], tables: list[Tensor], where: str) -> list[str]:
    rows = _by_slot(torch.tensor(load), tables[-1])
    messages = []
    if where == "here":
        messages = planner.plan_here(rows)
    else:
        assert planner.plan_there(rows) == len(load)
    tables.append(_tables(planner.maps))
    return messages


def _by_slot(load: Tensor, tables: Tensor) -> Tensor:
    """int64 [layers, ranks, slots of a rank], what each slot takes of [layers, experts]."""
    flat = tables.flatten(1)
    copies = torch.zeros_like(load).scatter_add_(1, flat, torch.ones_like(flat))
    return (load // copies).gather(1, flat).view_as(tables)


def _maps(tables: Tensor) -> Tensor:
    """From the expert in each slot to the slot of each expert, -1 where it has none."""
    layers, ranks, slots = tables.shape
    maps = torch.full((layers, ranks, int(tables.max()) + 1), -1)
    return maps.scatter_(2, tables, torch.arange(slots).expand(layers, ranks, slots))


def _tables(maps: Tensor) -> Tensor:
    """And back."""
    layers, ranks, _ = maps.shape
    order = np.argsort(np.where(maps < 0, maps.shape[2], maps), axis=2, kind="stable")
    slots = int((maps[0, 0] >= 0).sum())
    return torch.from_numpy(order[:, :, :slots]).view(layers, ranks, slots)


@contextmanager
def _recorded_errors(messages: list[str]) -> Iterator[None]:
    """What the planner's module writes as errors."""
    stock = eplb_worker.logger.error
    eplb_worker.logger.error = lambda message, *_: messages.append(message)
    try:
        yield
    finally:
        eplb_worker.logger.error = stock
