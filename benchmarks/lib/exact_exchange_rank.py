"""One rank of `shares.py --exchange`, as a process: exact shares with the exchange of variable
sizes, which is told its sizes by the gathered counts, or tells them itself.

Told what to do on standard input, in JSON; writes one line of JSON.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares
from equipoise.balancer.experts.planning.planner import plan
from equipoise.balancer.experts.routing.layer_update import table_update
from equipoise.balancer.experts.routing.levelled import GroupShareRouter
from equipoise.hal import registry
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.kernels import Tables
from equipoise.hal.stream import Role
from equipoise.pipeline.all_to_all.variable_size import VariableSizeExchange

DEADLINE, TOP_K, HIDDEN = 60.0, 8, 256
Seconds = dict[str, list[float]]


@dataclass(frozen=True)
class Layer:
    """A router and an exchange, and one batch."""

    router: GroupShareRouter
    exchange: VariableSizeExchange
    tokens: Tensor
    ids: Tensor

    def serve(self, known: bool) -> tuple[float, float]:
        """Seconds until rows may move, and of the whole layer but its experts."""
        began = time.perf_counter()
        slots = self.router.route(0, 0, self.ids)
        counts = self.router.dispatch_counts(0) if known else None
        route = self.exchange.prepare(slots, 1, counts)
        prepared = time.perf_counter()
        (rows,) = self.exchange.dispatch(route, [self.tokens])
        self.exchange.combine(route, rows)
        return prepared - began, time.perf_counter() - began


def measure(layer: Layer, rounds: int, calls: int) -> Seconds:
    """Median microseconds of a call, by round; the two forms take turns from layer to layer.

    So both have the same of what others do on this machine meanwhile.
    """
    figures: Seconds = {"known": [], "told": [], "known_layer": [], "told_layer": []}
    for _ in range(rounds + 1):
        served: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for call in range(2 * calls):
            known = call % 4 in (0, 3)  # neither is always behind the other
            served[known].append(layer.serve(known))
        for known, name in ((True, "known"), (False, "told")):
            prepared, whole = (
                statistics.median(part) * 1e6 for part in zip(*served[known], strict=True)
            )
            figures[name].append(prepared)
            figures[f"{name}_layer"].append(whole)
    # The first round makes the links.
    return {name: values[1:] for name, values in figures.items()}


def main() -> None:
    """Serve what standard input says."""
    task: dict[str, Any] = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    rank, ranks = task["rank"], task["ranks"]
    fabric = registry.communicator("gloo").connect(
        Rendezvous(rank=rank, size=ranks, host=task["host"], port=task["port"], deadline=DEADLINE)
    )
    accelerator = registry.accelerator("cpu").open(0)
    compute = accelerator.stream(Role.COMPUTE)
    shape = ExpertShape(1, task["experts"], task["slots"], ranks)
    odds = torch.randn(shape.experts, generator=torch.Generator().manual_seed(0)).exp()
    load = (odds * 1000).long().numpy()[None]
    placement = plan(load, slots=shape.slots, ranks=ranks, policy="connected").placement
    tables = Tables.empty(1, shape.experts, shape.slots, ranks, accelerator.device)
    layout = Layout(placement, even_shares(placement, shape.experts))
    accelerator.kernels.commit_tables(table_update(layout, shape, [0]), tables, compute)
    routing, rows = fabric.open("routing"), fabric.open("rows")
    counters = torch.zeros(1, shape.experts, dtype=torch.int32)
    seeded = torch.Generator().manual_seed(rank)
    layer = Layer(
        GroupShareRouter(accelerator, routing, tables, 0, counters, DEADLINE),
        VariableSizeExchange(rows, shape.slots_per_rank, compute, DEADLINE),
        torch.randn(task["tokens"], HIDDEN, generator=seeded),
        torch.multinomial(odds.expand(task["tokens"], -1), TOP_K, generator=seeded).int(),
    )
    figures: list[Seconds] = []
    compute.launch(lambda: figures.append(measure(layer, task["rounds"], task["calls"])))
    compute.synchronize(task["seconds"])
    accelerator.close()
    fabric.close()
    Path(task["told"]).write_text(json.dumps(figures[0]) + "\n")


if __name__ == "__main__":
    main()
