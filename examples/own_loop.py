"""A serve loop of one's own, balanced while it serves: two ranks, three layers, traffic that turns.

    torchrun --nproc-per-node 2 examples/own_loop.py      # or: python examples/own_loop.py

Each rank holds six of the twelve slots of a layer. It routes its own tokens, sends them to where
their experts are, and gets the results back; half way other experts become hot. Every row is
compared with what its expert would have given where nothing ever moved.

What a real loop replaces: `Layer.weights` by the model's tensors, `requests` by requests, `expert`
by its kernels. What it keeps: connect, register, open, `balancer.step`, `reading_slots`, `route`.
"""

import os
import sys
from functools import partial

import torch
from torch import Tensor

import equipoise

SHAPE = equipoise.ExpertShape(layers=3, experts=8, slots=12, ranks=2)
CONFIG = equipoise.BalancerConfig(window_size=4, step_interval=8, sub_window=4)
WIDTH, TOKENS, TOP_K, STEPS = 16, 64, 2, 48


def checkpoint(layer: int) -> Tensor:
    """All experts of a layer, float32 [experts, width, width]."""
    seeded = torch.Generator().manual_seed(layer)
    return torch.randn(SHAPE.experts, WIDTH, WIDTH, generator=seeded)


def expert(weight: Tensor, rows: Tensor) -> Tensor:
    """One expert on its rows."""
    return torch.tanh(rows @ weight)


def requests(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Rows [tokens, width], and the experts that the gate picks, int32 [tokens, top_k]."""
    seeded = torch.Generator().manual_seed(step * SHAPE.ranks + rank)
    # Of both pairs one rank has the only copies at first.
    hot_expert = 2 if step < STEPS // 2 else 6
    popularity = torch.ones(SHAPE.experts)
    popularity[[hot_expert, hot_expert + 1]] = 12.0
    expert_ids = torch.multinomial(popularity.expand(TOKENS, -1), TOP_K, generator=seeded)
    return torch.randn(TOKENS, WIDTH, generator=seeded), expert_ids.int()


class Layer:
    """One MoE layer on one rank: the weights in its slots, and an exchange with the other ranks."""

    def __init__(self, ranks: equipoise.Connection, number: int) -> None:
        first_slot = ranks.rank * SHAPE.slots_per_rank
        experts = equipoise.initial_placement(SHAPE)[
            number, first_slot : first_slot + SHAPE.slots_per_rank
        ]
        self.number = number
        self.weights = checkpoint(number)[experts.tolist()]  # the balancer moves what is in them
        tokens = ranks.fabric.open(f"tokens{number}")
        self.exchange = equipoise.VariableSizeExchange(
            tokens, SHAPE.slots_per_rank, ranks.compute, ranks.deadline
        )

    def forward(
        self, balancer: equipoise.ModelBalancer, step: int, x: Tensor, ids: Tensor
    ) -> Tensor:
        """Each token's experts on it, [tokens, top_k, width]."""
        with balancer.reading_slots(self.number, step):
            router = balancer.router(self.number)
            slots, generation = router.route(step, ids), router.generation
            # With `exact` shares the router knows what all ranks send; else this is None.
            route = self.exchange.prepare(slots, generation, router.dispatch_counts())
            (rows,) = self.exchange.dispatch(route, [x])
            out = torch.empty_like(rows)
            for slot in {*route.local_slots.tolist()}:
                mine = route.local_slots == slot
                out[mine] = expert(self.weights[slot], rows[mine])
            return self.exchange.combine(route, out)


def serve(ranks: equipoise.Connection) -> float:
    """Serve every step on this rank; the largest difference to experts that never moved."""
    layers = [Layer(ranks, number) for number in range(SHAPE.layers)]
    registry = equipoise.ModelRegistry("own", SHAPE.slots_per_rank, SHAPE.experts)
    for layer in layers:
        registry.register(layer.number, w=layer.weights)
    model = registry.finalize((f"layers.{layer.number}.w", layer.weights) for layer in layers)
    differences: list[float] = []

    def forward(step: int) -> None:
        x, ids = requests(step, ranks.rank)
        for layer in layers:
            outputs = layer.forward(balancer, step, x, ids)
            weights = checkpoint(layer.number)[ids]  # [tokens, top_k, width, width]
            expected = expert(weights, x[:, None, None, :]).squeeze(2)
            differences.append(float((outputs - expected).abs().max()))
            x = outputs.mean(dim=1)

    with equipoise.open_balancer(ranks, model, CONFIG) as balancer:
        for step in range(STEPS):
            with balancer.step(step):  # plans, transfers and votes overlap with what is launched
                ranks.compute.launch(partial(forward, step))
            ranks.compute.synchronize(ranks.deadline)
        if ranks.rank == 0:
            for report in balancer.reports:
                line = f"{report.outcome}, {report.copies} copies between ranks"
                print(f"step {report.step:3}: {line}")
    return max(differences)


def main() -> int:
    """Serve, and show what the first rank saw."""
    torch.set_num_threads(1)
    with equipoise.connect(deadline=60.0) as ranks:
        largest = serve(ranks)
    if ranks.rank == 0:
        print(f"largest difference to experts that never moved: {largest:g}")
    return 0 if largest < 1e-5 else 1


if __name__ == "__main__":
    if "RANK" not in os.environ:  # plain `python`: torchrun starts two ranks of this file
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # they share this machine's cores
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        os.execv(sys.executable, [sys.executable, *run])
    sys.exit(main())
