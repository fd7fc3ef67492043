"""A serve loop of one's own, balanced while it serves: two ranks, three layers, traffic that turns.

    python examples/own_loop.py

Each rank is a process. It holds six of twelve slots a layer, routes its own tokens, sends them to
where their experts are, and gets their results back; half way other experts become hot. Every row
is compared with what its expert would have given where nothing ever moved.

What a real loop replaces: `Layer.weights` by the model's own tensors, `tokens_of` by requests, and
`expert` by its kernels. What it keeps: register, open, `with balancer.step(n)`, `reading`, route.
"""

import multiprocessing
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.model_balancer import ModelBalancer
from equipoise.balancer.experts.open import ModelStart, open_balancers
from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    Placement,
    even_shares,
    initial_placement,
)
from equipoise.balancer.experts.weights.memory_spans import ModelSet
from equipoise.balancer.experts.weights.registry import ModelRegistry
from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator, open_for
from equipoise.hal.communicator import Fabric, Rendezvous
from equipoise.hal.stream import Role
from equipoise.pipeline.exchange import ExpertExchange

SHAPE = ExpertShape(layers=3, experts=8, slots=12, ranks=2)
WIDTH, TOKENS, TOP_K, STEPS = 16, 64, 2, 48
DEADLINE = 20.0
CONFIG = BalancerConfig(
    name="own", shares=ShareMode.LAGGED, window_size=4, step_interval=8, sub_window=4,
    timeout=DEADLINE,
)  # fmt: skip


def whole(layer: int) -> Tensor:
    """All experts of a layer, float32 [experts, width, width]: what a checkpoint would hold."""
    made = torch.Generator().manual_seed(layer)
    return torch.randn(SHAPE.experts, WIDTH, WIDTH, generator=made)


def expert(weight: Tensor, rows: Tensor) -> Tensor:
    """One expert on its rows."""
    return torch.tanh(rows @ weight)


def tokens_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Rows [tokens, width] and the experts that the gate picks, int32 [tokens, top_k]."""
    made = torch.Generator().manual_seed(step * SHAPE.ranks + rank)
    hot = 2 if step < STEPS // 2 else 6  # one rank alone holds them at first
    liking = torch.ones(SHAPE.experts)
    liking[[hot, hot + 1]] = 12.0
    picked = torch.multinomial(liking.expand(TOKENS, -1), TOP_K, generator=made)
    return torch.randn(TOKENS, WIDTH, generator=made), picked.int()


@dataclass(frozen=True)
class Layer:
    """One MoE layer on one rank.

    Attributes:
        number: the model's own.
        weights: float32 [slots of this rank, width, width]; the balancer moves what is in them.
        exchange: to the other ranks and back.
    """

    number: int
    weights: Tensor
    exchange: ExpertExchange

    def forward(self, balancer: ModelBalancer, step: int, x: Tensor, ids: Tensor) -> Tensor:
        """Each token's experts on it, [tokens, top_k, width]."""
        with balancer.reading(self.number, step):
            router = balancer.router(self.number)
            slots, generation = router.route(step, ids), router.generation
            route = self.exchange.prepare(slots, generation)
            (rows,) = self.exchange.dispatch(route, [x])
            out = torch.empty_like(rows)
            for slot in {*route.local_slots.tolist()}:
                mine = route.local_slots == slot
                out[mine] = expert(self.weights[slot], rows[mine])
            return self.exchange.combine(route, out)


class Rank:
    """One rank: its device, its layers, its balancer."""

    def __init__(self, accelerator: Accelerator, fabric: Fabric) -> None:
        self.rank = fabric.control.rank
        placement = initial_placement(SHAPE)
        self.layers = [
            Layer(
                number,
                self._weights(number, placement),
                self._exchange(accelerator, fabric, number),
            )
            for number in range(SHAPE.layers)
        ]
        known = ModelRegistry("own", SHAPE.slots_per_rank, SHAPE.experts)
        for layer in self.layers:
            known.register(layer.number, w=layer.weights)
        model = known.finalize((f"layers.{at.number}.w", at.weights) for at in self.layers)
        start = ModelStart(Layout(placement, even_shares(placement, SHAPE.experts)), CONFIG)
        budget = 4 * model.groups[0].slot_bytes
        self.balancers = open_balancers(
            accelerator, fabric, ModelSet((model,)), {"own": start}, budget=budget
        )
        self.balancer = self.balancers["own"]
        self.compute = accelerator.stream(Role.COMPUTE)

    def serve(self, step: int) -> float:
        """One step; how far any row is from what it would be where nothing moves."""
        off: list[float] = []
        x, ids = tokens_of(step, self.rank)
        with self.balancer.step(step):  # the boundary before it; work beside begins behind
            self.compute.launch(lambda: off.append(self._forward(step, x, ids)))
        self.compute.synchronize(DEADLINE)
        return off[0]

    def _forward(self, step: int, x: Tensor, ids: Tensor) -> float:
        worst = 0.0
        for layer in self.layers:
            found = layer.forward(self.balancer, step, x, ids)
            weights = whole(layer.number)[ids]  # [tokens, top_k, width, width]
            due = expert(weights, x[:, None, None, :]).squeeze(2)
            worst = max(worst, float((found - due).abs().max()))
            x = found.mean(dim=1)
        return worst

    def _weights(self, layer: int, placement: Placement) -> Tensor:
        first = self.rank * SHAPE.slots_per_rank
        mine = placement[layer, first : first + SHAPE.slots_per_rank].tolist()
        return whole(layer)[mine].clone()

    @staticmethod
    def _exchange(accelerator: Accelerator, fabric: Fabric, layer: int) -> ExpertExchange:
        stream = accelerator.stream(Role.COMPUTE)
        return ExpertExchange(fabric.open(f"tokens{layer}"), SHAPE.slots_per_rank, stream, DEADLINE)


def rank(where: Rendezvous, told: Connection) -> None:
    """A process: serve every step, then say what was seen."""
    torch.set_num_threads(1)
    fabric = registry.communicator("gloo").connect(where)
    accelerator = open_for(registry.accelerator("cpu"), where.rank)
    served = Rank(accelerator, fabric)
    worst = max(served.serve(step) for step in range(STEPS))
    fabric.open("end").barrier().result(DEADLINE)
    reports = served.balancer.reports
    served.balancers.close()
    told.send((worst, [(report.step, report.outcome, report.slots) for report in reports]))
    accelerator.close()
    fabric.close()


def main() -> int:
    """Start the ranks, wait for them, and show what the first one saw."""
    spawn, host = multiprocessing.get_context("spawn"), registry.communicator("gloo").host()
    ends, processes = [], []
    for number in range(SHAPE.ranks):
        mine, theirs = spawn.Pipe()
        at, port = host.address
        where = Rendezvous(rank=number, size=SHAPE.ranks, host=at, port=port, deadline=DEADLINE)
        processes.append(spawn.Process(target=rank, args=(where, theirs), daemon=True))
        ends.append(mine)
        processes[-1].start()
    seen = [end.recv() for end in ends if end.poll(120)]
    for process in processes:
        process.join(DEADLINE)
    host.close()
    if len(seen) < SHAPE.ranks:
        sys.stderr.write("a rank has not come to the end\n")
        return 1
    worst, epochs = seen[0]
    for step, outcome, slots in epochs:
        sys.stdout.write(f"step {step:3}: epoch {outcome}, {slots} copies between ranks\n")
    sys.stdout.write(f"largest difference to experts that never moved: {worst:g}\n")
    return 0 if worst < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
