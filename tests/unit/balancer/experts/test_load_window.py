import numpy as np
import torch
from helpers.eager_worker import EagerWorker
from helpers.processes.thread_ranks import GroupMember, on_ranks

from equipoise.balancer.experts.batch_sampler import BatchSampler
from equipoise.balancer.experts.load_window import LoadWindow, WindowSchedule
from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    even_shares,
    initial_placement,
)
from equipoise.balancer.experts.runtime.events import Track
from equipoise.balancer.experts.runtime.jobs import run_blocking
from equipoise.hal.stream import Role

SHAPE = ExpertShape(layers=1, experts=2, slots=2, ranks=1)
LAYOUT = Layout(initial_placement(SHAPE), even_shares(initial_placement(SHAPE), SHAPE.experts))


def window(member: GroupMember, sub_window: int = 2, total: int = 4, period: int = 0) -> LoadWindow:
    loads, worker = member.fabric.open("loads"), EagerWorker(Track.LOAD, 20.0)
    schedule = WindowSchedule(sub_window, total, period or total)
    return LoadWindow(member.accelerator, loads, SHAPE, schedule, worker)


def sampled_window(member: GroupMember) -> LoadWindow:
    """A window of two-step sub-windows that samples a step of each."""
    loads, worker = member.fabric.open("loads"), EagerWorker(Track.LOAD, 20.0)
    sampler = BatchSampler(member.accelerator, loads, worker, lambda: LAYOUT)
    return LoadWindow(member.accelerator, loads, SHAPE, WindowSchedule(2, 4, 4), worker, sampler)


def count(member: GroupMember, load: LoadWindow, *rows: int) -> None:
    """Counts rows on the compute stream, as routing does."""
    more = torch.tensor([rows], dtype=torch.int32)

    def program() -> None:
        load.counters.add_(more)

    member.accelerator.stream(Role.COMPUTE).launch(program)


def observe(member: GroupMember) -> list[tuple[bool, bool, list[int]]]:
    """(is_summed, full, total) before each step; rank r adds (1, 10 * (r + 1)) in every step."""
    load = window(member)
    observations = []
    for step in range(8):
        is_summed = run_blocking(load.advance(step), 20.0)
        total = load.windows.sum(axis=0)[0].tolist() if load.sums else []
        observations.append((is_summed, load.full, total))
        count(member, load, 1, 10 * (member.rank + 1))
    run_blocking(load.drain(), 20.0)
    return observations


def test_load_window_sums_arrive_one_boundary_later_on_every_rank() -> None:
    first, second = on_ranks(2, observe)
    assert first == second
    assert [is_summed for is_summed, _, _ in first] == [
        False,
        False,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    assert first[3][2] == [4, 60]
    assert first[5] == (True, True, [8, 120])
    assert first[7] == (True, True, [8, 120])


def test_load_window_keeps_only_its_last_sub_windows() -> None:
    def program(member: GroupMember) -> tuple[list[int], list[int]]:
        load = window(member)
        for step in range(10):
            run_blocking(load.advance(step), 20.0)
            count(member, load, step, 0)
        return load.windows.sum(axis=0)[0].tolist(), load.latest[0].tolist()

    ((total, latest),) = on_ranks(1, program)
    assert total == [4 + 5 + 6 + 7, 0]
    assert latest == [6 + 7, 0]


def test_load_window_sums_large_counts_as_integers() -> None:
    def program(member: GroupMember) -> int:
        load = window(member)
        for step in range(4):
            run_blocking(load.advance(step), 20.0)
            if step % 2 == 0:
                count(member, load, 2**30 + 1, 0)
        return int(load.latest[0, 0])

    assert on_ranks(2, program) == [2**31 + 2] * 2


def test_load_window_drops_counts_outside_windows() -> None:
    def program(member: GroupMember) -> list[tuple[int, int]]:
        load = window(member, sub_window=1, total=2, period=5)
        step_sums = []
        for step in range(12):
            if run_blocking(load.advance(step), 20.0):
                step_sums.append((step, int(load.latest[0, 0])))
            count(member, load, 2**step, 0)
        return step_sums

    # Windows are steps 3 and 4, 8 and 9; a sum is taken one boundary after its sub-window.
    assert on_ranks(1, program) == [[(5, 2**3), (6, 2**4), (10, 2**8), (11, 2**9)]]


def test_load_window_loses_no_count_between_sub_windows() -> None:
    def program(member: GroupMember) -> int:
        load = window(member, sub_window=1, total=1)
        total = 0
        for step in range(9):
            if run_blocking(load.advance(step), 20.0):
                total += int(np.sum(load.latest))
            count(member, load, 0, 3)
        return total

    assert on_ranks(1, program) == [7 * 3]


def test_load_window_due_names_next_boundary_with_work() -> None:
    def program(member: GroupMember) -> list[int]:
        load = window(member, sub_window=3, total=3)
        due = []
        for step in range(5):
            run_blocking(load.advance(step), 20.0)
            due.append(load.next_due_step(step))
        run_blocking(load.drain(), 20.0)
        return due

    assert on_ranks(1, program) == [[3, 3, 3, 4, 6]]


def test_load_window_keeps_samples_that_nobody_has_taken_until_its_end() -> None:
    def program(member: GroupMember) -> list[tuple[int, list[list[int]]]]:
        load = sampled_window(member)
        for step in range(9):
            run_blocking(load.advance(step), 20.0)
            count(member, load, step, member.rank)
        run_blocking(load.drain(), 20.0)
        # Closed before steps 2, 4, 6 and 8, each with the gather of the step sampled before.
        return [(sample.step, sample.counts[:, 0].tolist()) for sample in load.take_samples()]

    samples = [(step, [[step, 0], [step, 1]]) for step in (2, 4, 6)]
    assert on_ranks(2, program) == [samples] * 2


def test_load_window_has_no_further_boundary_with_work_for_samples() -> None:
    def program(member: GroupMember) -> list[int]:
        load = sampled_window(member)
        due = []
        for step in range(6):
            run_blocking(load.advance(step), 20.0)
            due.append(load.next_due_step(step))
        run_blocking(load.drain(), 20.0)
        return due

    assert on_ranks(1, program) == [[2, 2, 3, 4, 5, 6]]
