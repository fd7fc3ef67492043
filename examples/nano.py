"""How an expert moves between two ranks while both compute. Read from the top.

    python examples/nano.py

One layer has 8 experts in 12 slots, six on each of two ranks. Experts 2 and 3 are hot, and rank 0
holds their only copies: in every step rank 1 waits for rank 0. The engine sees that, plans copies
for rank 1, moves their weights while both ranks compute, and switches to them between two steps.
Rank 1, to which the weights come, prints what its engine tells.
"""

import os
import sys
from functools import partial

import torch

import equipoise
from equipoise import events

SHAPE = equipoise.ExpertShape(layers=1, experts=8, slots=12, ranks=2)
WIDTH, TOKENS, TOP_K = 16, 512, 2
POPULARITY = torch.tensor([1.0, 1.0, 8.0, 8.0, 1.0, 1.0, 1.0, 1.0])

# A rebalance may begin every 8 steps, with the load of the 4 steps before.
CONFIG = equipoise.BalancerConfig(window_size=4, step_interval=8, sub_window=4)
MAX_STEPS, STEPS_AFTER_COMMIT = 2000, 12


def expert(number: int) -> torch.Tensor:
    """The weights of an expert, float32 [width, width], as a checkpoint would have them."""
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number))


def serve(ranks: equipoise.Connection) -> None:
    """Serve on this rank; every rank runs this."""
    # 1. Slots. Experts are held in slots, whose addresses never change. Slot k is on rank k // 6,
    #    and the placement says which expert is in it: 0 to 5 on rank 0; 4 to 7, 0 and 1 on rank 1.
    placement = equipoise.initial_placement(SHAPE)[0].tolist()
    mine = slice(ranks.rank * SHAPE.slots_per_rank, (ranks.rank + 1) * SHAPE.slots_per_rank)
    weights = torch.stack([expert(number) for number in placement[mine]])

    # 2. The registry: which tensors move with an expert. Their first dimension is the slot.
    registry = equipoise.ModelRegistry("nano", SHAPE.slots_per_rank, SHAPE.experts)
    registry.register(0, w=weights)
    model = registry.finalize([("layers.0.w", weights)])

    # 3. The balancer. It opens communicators for loads and for weights, and staging: buffers that
    #    weights wait in until their commit. All ranks compare what they open before they open it.
    narrator = Narrator() if ranks.rank == 1 else None
    with equipoise.open_balancer(ranks, model, CONFIG, events=narrator) as balancer:
        if narrator is not None:
            print(f"{balancer.memory_report}\n\nplacement {placement}\n\nstep  what")
        chance = torch.Generator().manual_seed(ranks.rank)
        for step in range(MAX_STEPS):
            expert_ids = torch.multinomial(POPULARITY.expand(TOKENS, -1), TOP_K, generator=chance)
            # 4. Before a step the engine settles the vote that was cast in the step before, and
            #    acts on it. The planner, transfers and the next vote overlap with the step.
            with balancer.step(step):
                ranks.compute.launch(partial(forward, balancer, step, expert_ids.int()))
            ranks.compute.synchronize(ranks.deadline)
            # Both ranks commit before the same step, so both stop after the same one.
            commits = [done.step for done in balancer.reports if done.outcome == "committed"]
            if commits and step >= commits[0] + STEPS_AFTER_COMMIT:
                break
        else:
            sys.exit(f"no rebalance was committed in {MAX_STEPS:,} steps")
        installed = balancer.layout.placement[0].tolist()

    # 5. The proof: every slot holds the expert that the installed placement says.
    for weight, number in zip(weights, installed[mine], strict=True):
        assert torch.equal(weight, expert(number)), f"slot of expert {number} holds other weights"
    if narrator is not None:
        print(f"\nplacement {installed}: every slot of rank 1 holds its expert")
        print(f"imbalance {narrator.imbalance[0]:.3f} before, {narrator.imbalance[-1]:.3f} after")


def forward(balancer: equipoise.ModelBalancer, step: int, expert_ids: torch.Tensor) -> None:
    """The layer, up to where a serve loop sends each row to its slot (see own_loop.py).

    Routing turns the experts that the gate picked, int32 [tokens, top_k], into slots: an expert's
    rows are divided among its copies by their shares. It counts the load in the same pass.
    """
    with balancer.reading_slots(0, step):
        balancer.router(0).route(step, expert_ids)


VERDICTS = {
    "Pending()": "some rank is still busy: ask again in the next step",
    "StartTransfer()": "all ranks have the same plan: let the weights travel",
    "Commit(chunks=1)": "staged on all ranks, and equal to what was sent: commit",
}


class Narrator:
    """Prints what the engine tells. Called in order, by a thread that no step waits for."""

    def __init__(self) -> None:
        self.imbalance: list[float] = []

    def __call__(self, event: object) -> None:
        """One line for each event that is part of the story; there are more."""
        match event:
            case events.LoadReduced(step=step, load=load):
                say(step, "load", f"rows by expert, over both ranks: {load[0].tolist()}")
            case events.BalanceMeasured(step=step, imbalance=imbalance):
                self.imbalance.append(imbalance)
                say(step, "load", f"the busier rank has {1 + imbalance:.2f} times the mean")
            case events.StateChanged(step=step, state=state):
                say(step, "state", state)
            case events.TraceSpan(details={"before": before, "predicted": predicted}):
                say("", "plan", f"imbalance {before:.2f} now, {predicted:.2f} with the plan")
            case events.TraceSpan(details={"verdict": verdict}):
                say("", "vote", VERDICTS.get(str(verdict), str(verdict)))
            case events.TraceSpan(details={"copies": copies, "bytes received": received}):
                say("", "staged", f"{copies} copies have come to this rank, {received} bytes")
            case events.RebalanceEnded(record=record, placements=(before, after)):
                say(record.ended_at, "commit", f"{record.outcome}, {record.copies} copies moved")
                for slot in (before[0] != after[0]).nonzero()[0].tolist():
                    change = f"expert {before[0, slot]} becomes expert {after[0, slot]}"
                    say("", "", f"slot {slot}: {change}")


def say(step: int | str, what: str, line: str) -> None:
    """One line."""
    print(f"{step:>4}  {what:<8}{line}", flush=True)


if __name__ == "__main__":
    if "RANK" not in os.environ:  # plain `python`: torchrun starts two ranks of this file
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # they share this machine's cores
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        os.execv(sys.executable, [sys.executable, *run])
    with equipoise.connect() as connected:
        serve(connected)
