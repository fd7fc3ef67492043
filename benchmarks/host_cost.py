"""What the engine costs the host: at a boundary outside an epoch, and to commit a layer.

    python benchmarks/host_cost.py          half a minute
    python benchmarks/host_cost.py --quick  for a look; nothing is kept

58 layers x 256 experts, 288 slots, 32 ranks; one process stands for one rank, with a group of its
own, and its slots hold one byte: no weight is moved, nobody is waited for. Every figure is the
median of rounds, with the least and the most of them; of boundaries as the clock says, of commits
and maps, which wait for nothing, as the thread's processor time.

- A boundary: by where it is within a sub-window. Most have nothing to do; one closes the sub-window
  and begins its sum, the next takes the sum (and begins to solve shares), the one behind that takes
  the shares. Between two boundaries there is time, as there is a forward.
- A commit of one layer in which all slots of the rank change, in host time: what the thread that
  steps is held up, and the tables and their digest, which a worker makes beside the forward. What
  the stream runs is apart: here it is a thread, elsewhere a device. Beside it, maps built one slot
  at a time, in turns with it.

Writes benchmarks/results/host_cost.json; `python benchmarks/performance.py` shows it.
"""

import argparse
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from engine_figures import spread
from engine_page import COMMIT, OUTSIDE, host
from engine_rig import Rig, rig
from evidence import save
from straightforward import InUse, install

from equipoise.balancer.experts.balancer import ExpertBalancer
from equipoise.balancer.experts.change import Change, change_of
from equipoise.balancer.experts.config import EngineConfig, ShareMode
from equipoise.balancer.experts.installed import Copies, Installed
from equipoise.balancer.experts.layout import Layout, even_shares, solve_shares
from equipoise.balancer.experts.placement import Shape, contiguous
from equipoise.hal.slots import Segment, SlotLayout, SlotStore
from equipoise.hal.stream import Role

SHAPE = Shape(layers=58, experts=256, slots=288, ranks=32)
SUB_WINDOW, SUB_WINDOWS, ROUNDS = 32, 4, 5
COMMITS, IN_A_ROW = 40, 8
FORWARD = 0.03
"""Seconds between boundaries that have something to do."""
DEADLINE = 20.0
MICRO = 1e6
PHASES = "closes the sub-window", "takes its sum", "takes the shares"


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two rounds, not kept")
    chosen = parser.parse_args()
    rounds = 2 if chosen.quick else ROUNDS
    torch.set_num_threads(1)
    with rig() as found:
        figures = {"rows": [*boundaries(found, rounds), *commits(found, rounds)]}
    sys.stdout.write("\n".join(host(figures)) + "\n")
    if not chosen.quick:
        save("host_cost", ["python", "benchmarks/host_cost.py"], figures)


def boundaries(found: Rig, rounds: int) -> list[dict[str, Any]]:
    """Rows on boundaries outside an epoch, of both share modes."""
    rows = []
    for mode in (ShareMode.STATIC, ShareMode.LAGGED):
        with _balancer(found, mode) as balancer:
            told = [_sub_windows(balancer, turn) for turn in range(rounds)]
        # With static shares nobody sums a sub-window that no plan is made from.
        phases = PHASES if mode is ShareMode.LAGGED else ()
        rows.append(_row(f"boundary, {mode} shares", OUTSIDE, [each[-1] for each in told]))
        rows += [
            _row(f"boundary, {mode} shares, that {words}", None, [each[phase] for each in told])
            for phase, words in enumerate(phases)
        ]
    return rows


def _sub_windows(balancer: ExpertBalancer, turn: int) -> tuple[float, ...]:
    """Seconds of a boundary that closes, takes, solves; and of one that has nothing to do."""
    busy: list[list[float]] = [[], [], []]
    idle = []
    for number in range(SUB_WINDOWS):
        first = (turn * SUB_WINDOWS + number) * SUB_WINDOW
        for phase, times in enumerate(busy):
            times.append(_timed(lambda step=first + phase: balancer.boundary(step)))
            _load(balancer)
            time.sleep(FORWARD)
        idle.append(_idle(balancer, range(first + len(busy), first + SUB_WINDOW)))
    return (*map(statistics.median, busy), statistics.median(idle))


def _idle(balancer: ExpertBalancer, steps: range) -> float:
    """Seconds of one of many boundaries that have nothing to do."""
    return _timed(lambda: [balancer.boundary(step) for step in steps]) / len(steps)


def _load(balancer: ExpertBalancer) -> None:
    """Rows of a forward: uneven, so that there is something to solve."""
    drawn = np.random.default_rng(0).lognormal(sigma=1.0, size=balancer.load.counters.shape)
    balancer.load.counters += torch.from_numpy((100 * drawn).astype(np.int32))


def commits(found: Rig, rounds: int) -> list[dict[str, Any]]:
    """Rows on the commit of one layer."""
    installed, layouts = engine_side(found)
    maps = InUse.empty(SHAPE.experts)
    told: dict[str, list[float]] = {}
    for _ in range(rounds):
        with one_core():
            figures = _round(found, installed, layouts, maps)
        figures["any core"] = _round(found, installed, layouts, maps)["all"]
        for name, seconds in figures.items():
            told.setdefault(name, []).append(seconds)
    return [
        _row("commit of one layer, host time in all", COMMIT, told["all"]),
        _row("of it: the thread that steps", None, told["host"]),
        _row("of it: tables, beside the forward", None, told["tables"]),
        _row("of it: their digest, beside the forward", None, told["digest"]),
        _row("the same, the stream's thread on any core", None, told["any core"]),
        _row(f"commit of one of {IN_A_ROW} layers in a row, in all", None, told["in a row"]),
        _row("not in it: what the stream runs", None, told["stream"]),
        _row("maps of one layer, one slot at a time", None, told["straightforward"]),
    ]


def _round(
    found: Rig, installed: Installed, layouts: tuple[Layout, Layout], maps: InUse
) -> dict[str, float]:
    """Medians of seconds, each part in turns with the others."""
    parts: dict[str, list[float]] = {
        name: []
        for name in ("tables", "digest", "host", "stream", "all", "in a row", "straightforward")
    }
    for number in range(COMMITS):
        layer, layout = number % SHAPE.layers, layouts[number % 2]
        for name, seconds in commit_parts(found, installed, layout, layer).items():
            parts[name].append(seconds)
        row = torch.from_numpy(layout.placement[layer].astype(np.int64))
        if number % IN_A_ROW == 0:
            parts["in a row"].append(_in_a_row(found, installed, layout, number))
            parts["straightforward"].append(_cpu(lambda row=row: install(row, maps)))
    return {name: statistics.median(times) for name, times in parts.items()}


def commit_parts(found: Rig, installed: Installed, layout: Layout, layer: int) -> dict[str, float]:
    """Seconds of the parts of one commit."""
    made: list[Change] = []
    tables = _cpu(lambda: made.append(change_of(layout, SHAPE, [layer])))
    digest = _cpu(lambda: made[0].digest)
    copies = _copies(layer)
    with _held_back(found):
        launched = _cpu(lambda: installed.commit(made[0], copies))
    return {
        "tables": tables,
        "digest": digest,
        "host": launched,
        "all": tables + digest + launched,
        "stream": max(_in_place(found, installed, made[0], copies) - launched, 0.0),
    }


def _in_a_row(found: Rig, installed: Installed, layout: Layout, first: int) -> float:
    """Seconds of all parts that a layer takes on average."""
    layers = range(first, first + IN_A_ROW)
    made: list[Change] = []
    tables = _cpu(lambda: made.extend(change_of(layout, SHAPE, [layer]) for layer in layers))
    digests = _cpu(lambda: [change.digest for change in made])
    pairs = [(change, _copies(layer)) for change, layer in zip(made, layers, strict=True)]
    with _held_back(found):
        launched = _cpu(lambda: [installed.commit(*pair) for pair in pairs])
    return (tables + digests + launched) / IN_A_ROW


def _copies(layer: int) -> Copies:
    """All slots of the rank, each from staging of its own."""
    first = layer * SHAPE.slots_per_rank
    return tuple((slot, first + slot) for slot in range(SHAPE.slots_per_rank))


def _in_place(found: Rig, installed: Installed, change: Change, copies: Copies) -> float:
    """Seconds of host and stream in one: in a program of its own stream everything runs at once."""
    whole: list[float] = []
    compute = found.accelerator.stream(Role.COMPUTE)
    compute.launch(lambda: whole.append(_cpu(lambda: installed.commit(change, copies))))
    compute.synchronize(DEADLINE)
    return whole[0]


@contextmanager
def _held_back(found: Rig) -> Iterator[None]:
    """Keep the compute stream from running what is launched, so that it takes no time from us."""
    compute, go_on = found.accelerator.stream(Role.COMPUTE), threading.Event()
    compute.launch(lambda: go_on.wait(DEADLINE))
    try:
        yield
    finally:
        go_on.set()
        compute.synchronize(DEADLINE)


@contextmanager
def one_core() -> Iterator[None]:
    """All threads of this process on one core."""
    mine = os.sched_getaffinity(0)
    _keep_to({min(mine)})
    try:
        yield
    finally:
        _keep_to(mine)


def _keep_to(cores: set[int]) -> None:
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), cores)


def _timed(call: Callable[[], object]) -> float:
    """Seconds, waits included."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _cpu(call: Callable[[], object]) -> float:
    """Seconds of this thread's processor: for what waits for nothing, where cores are shared."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def _row(what: str, bar: float | None, seconds: list[float]) -> dict[str, Any]:
    return {
        "what": what,
        "bar": bar,
        "microseconds": spread(round(value * MICRO, 3) for value in seconds),
    }


@contextmanager
def _balancer(found: Rig, mode: ShareMode) -> Iterator[ExpertBalancer]:
    """An engine that opens no epoch."""
    config = EngineConfig(
        label=f"host-cost-{mode}",
        shares=mode,
        window_size=SUB_WINDOW,
        step_interval=SUB_WINDOW << 20,
        sub_window=SUB_WINDOW,
        deadline=DEADLINE,
    )
    layout = _layouts()[0]
    balancer = found.balancer(_store(found), SHAPE, layout, config)
    gc.collect()
    gc.freeze()
    try:
        yield balancer
    finally:
        gc.unfreeze()
        balancer.close()


def engine_side(found: Rig) -> tuple[Installed, tuple[Layout, Layout]]:
    """What a rank has installed, and two layouts that differ in every slot."""
    layouts = _layouts()
    return Installed(found.accelerator, _store(found), SHAPE, layouts[0]), layouts


def _layouts() -> tuple[Layout, Layout]:
    """The start layout, and one in which every slot holds another expert."""
    placement = contiguous(SHAPE)
    turned = np.roll(placement, SHAPE.slots_per_rank, axis=1)
    drawn = np.random.default_rng(0).lognormal(sigma=1.0, size=(SHAPE.layers, SHAPE.experts))
    load = (1000 * drawn).astype(np.int64)
    return (
        Layout(placement, even_shares(placement, SHAPE.experts)),
        Layout(turned, solve_shares(load, turned, SHAPE)),
    )


def _store(found: Rig) -> SlotStore:
    """Slots of one byte."""
    held = torch.zeros((SHAPE.layers * SHAPE.slots_per_rank, 1), dtype=torch.uint8)
    slots = tuple((Segment("none", row),) for row in held)
    return found.accelerator.slot_store(SlotLayout(slots, SHAPE.slots_per_rank))


if __name__ == "__main__":
    main()
