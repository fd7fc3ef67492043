"""The exchange of fixed capacity among processes, beside a dense reference."""

import os
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from exploration.exchange import case as cases
from exploration.exchange import oracle
from exploration.exchange.alternative_kernels import NaiveKernels
from exploration.exchange.rank_program import Script
from exploration.exchange.run_case import Make, made_wire
from helpers.rank_programs.tensor_patterns import DTYPES, same
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.backends.cpu import BACKEND
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.errors import GenerationMismatch, StreamFailed
from equipoise.hal.stream import Role
from equipoise.pipeline.all_to_all.fallback import (
    CombineHandle,
    DispatchHandle,
    ExchangeWithFallback,
    FallbackExchange,
    TokenExchange,
)
from equipoise.pipeline.all_to_all.fixed_capacity import FixedCapacityExchange
from equipoise.pipeline.all_to_all.torch_kernels import TorchKernels, device_allocator


def round_trips(fabric: Fabric, given: dict[str, Any], where: str) -> dict[str, Any]:
    """Play a case here, if this rank takes part in it.

    Args:
        fabric: of the processes.
        given: the case.
        where: "host" calls from this thread, "stream" from a program of the compute stream.
    """
    case = cases.case(given)
    group = fabric.open("experts")
    if group.rank not in case.ranks:
        return {"wrong": {}, "verdicts": []}
    script = _script(case, group)
    _from(where, script.accelerator, lambda: _run(script))
    return {"wrong": script.report.wrong, "verdicts": script.report.verdicts}


def other_kernels(fabric: Fabric, given: dict[str, Any]) -> dict[str, Any]:
    """As `round_trips`, with kernels of another making."""
    case = cases.case(given)
    script = _script(case, fabric.open("experts"), NaiveKernels)
    _from("host", script.accelerator, lambda: _run(script))
    return {"wrong": script.report.wrong, "verdicts": script.report.verdicts}


def lose_a_rank(fabric: Fabric, given: dict[str, Any], victim: int) -> dict[str, Any]:
    """A rank is killed before it dispatches; the others go on among themselves."""
    case = cases.case(given)
    group, spare = fabric.open("experts"), fabric.open("spare")
    script = _script(case, group)
    if group.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    stream = script.accelerator.stream(Role.COMPUTE)
    cause = ""
    try:
        script.exchange.dispatch(script.batch(0, 0), stream).wait(stream)
        script.exchange.read_status(stream).result(WATCHDOG)
    except StreamFailed as failure:
        cause = type(failure.__cause__).__name__
    script.accelerator.close()
    remaining = replace(case, active=[rank for rank in range(case.size) if rank != victim])
    after = _script(remaining, spare)
    _from("host", after.accelerator, lambda: _run(after))
    return {"told": cause, "wrong": after.report.wrong, "verdicts": after.report.verdicts}


def mismatched_step(fabric: Fabric, given: dict[str, Any]) -> list[str]:
    """What `ExchangeWithFallback.run` says where ranks differ in the generation of one step."""
    case = cases.case(given)
    script = _script(case, fabric.open("experts"))
    stream = script.accelerator.stream(Role.COMPUTE)
    among = fabric.open("fallback")
    portable = FallbackExchange(case.form(), among, script.accelerator, WATCHDOG, case.ranks)
    sure = ExchangeWithFallback(script.exchange, portable, stream)
    outcomes: list[str] = []
    for step in range(len(case.steps)):
        try:
            sure.run(partial(_step, script, step), WATCHDOG)
            outcomes.append("ran")
        except GenerationMismatch as error:
            outcomes.append(str(error).partition(":")[0])
    script.accelerator.close()
    return outcomes


def sure_steps(fabric: Fabric, given: dict[str, Any], where: str) -> dict[str, Any]:
    """Every step of a case to its end, on the portable exchange where it does not fit."""
    case = cases.case(given)
    group = fabric.open("experts")
    if group.rank not in case.ranks:
        return {"wrong": [], "tally": {}}
    script = _script(case, group)
    accelerator = script.accelerator
    stream = accelerator.stream(Role.COMPUTE)
    among = fabric.open("fallback", case.ranks)
    portable = FallbackExchange(case.form(), among, accelerator, WATCHDOG, case.ranks)
    sure = ExchangeWithFallback(script.exchange, portable, stream)
    wrong: list[str] = []

    def play() -> None:
        for step in range(len(case.steps)):
            results = sure.run(partial(_step, script, step), WATCHDOG)
            stream.launch(partial(_compare, script, step, results, wrong))

    _from(where, accelerator, play)
    wrong += script.report.wrong.values()
    return {"wrong": wrong, "tally": asdict(sure.statistics)}


def _step(script: Script, step: int, exchange: TokenExchange) -> list[Tensor]:
    """All batches, two at a time; clones of their results, once the stream has come to it."""
    results_by_batch: list[Tensor] = []
    numbers = range(len(script.case.steps[step]))
    for first in numbers[::2]:
        pair = numbers[first : first + 2]
        dispatches = [exchange.dispatch(script.batch(step, n), script.stream(n)) for n in pair]
        combines = [_expert(script, step, n, d) for n, d in zip(pair, dispatches, strict=True)]
        for combined in combines:
            stream = script.accelerator.stream(Role.COMPUTE)
            results = combined.wait(stream)
            stream.launch(partial(_keep, results_by_batch, results))
            combined.release(stream)
    return results_by_batch


def _keep(results_by_batch: list[Tensor], results: Tensor) -> None:
    results_by_batch.append(results.clone())


def _expert(script: Script, step: int, number: int, dispatched: DispatchHandle) -> CombineHandle:
    stream = script.stream(number)
    arrivals = dispatched.wait(stream)
    shape, dtype = script.case.result
    rows = torch.empty(arrivals.entry_rows.shape[0], *shape, dtype=DTYPES[dtype])
    stream.launch(partial(script.look_at_loads, step, number, arrivals))
    stream.launch(lambda: rows.copy_(script.expert(arrivals)))
    return dispatched.combine(rows, stream)


def _compare(script: Script, step: int, results_by_batch: list[Tensor], wrong: list[str]) -> None:
    for number, results in enumerate(results_by_batch):
        expected = oracle.dense(script.case, step, number, script.rank)
        if not same(results, expected):
            wrong.append(f"step {step}, batch {number}: {results}, not {expected}")


def _script(case: cases.Case, group: Communicator, make: Make = TorchKernels) -> Script:
    accelerator, form = BACKEND.open(0), case.form()
    memory = device_allocator(accelerator.device)
    kernels = make(form, made_wire(case, group, accelerator, WATCHDOG), memory)
    exchange = FixedCapacityExchange(form, kernels, accelerator)
    return Script(
        case, group.rank, exchange, accelerator, lambda n: torch.empty(n, dtype=torch.uint8)
    )


def _from(where: str, accelerator: Accelerator, play: Callable[[], None]) -> None:
    """Call it, or launch it, and end everything."""
    if where == "host":
        play()
    else:
        accelerator.stream(Role.COMPUTE).launch(play)
    accelerator.synchronize(WATCHDOG)
    accelerator.close()


def _run(script: Script) -> None:
    for _ in script.play():
        """Nothing chooses who moves next."""
