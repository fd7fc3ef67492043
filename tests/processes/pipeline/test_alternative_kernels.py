"""Kernels of another making in the place of the reference."""

from dataclasses import asdict, replace

import torch
from exploration.exchange.alternative_kernels import NaiveKernels
from exploration.exchange.case import PLAIN, Case
from exploration.exchange.in_process_wire import Table, TableWire
from exploration.exchange.run_case import play
from exploration.exchange.strategies import cases
from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import fixed_exchange
from hypothesis import HealthCheck, given, note, settings

from equipoise.hal.conformance.properties.resources_signatures import signature_differences
from equipoise.pipeline.all_to_all.kernels import CapturedKernels, ExchangeKernels
from equipoise.pipeline.all_to_all.torch_kernels import TorchKernels, device_allocator

SOME = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])


@SOME
@given(cases())
def test_exchange_with_alternative_kernels_matches_reference(case: Case) -> None:
    note(repr(case))
    assert play(case, make=NaiveKernels) == {}


def test_alternative_exchange_kernels_match_reference_between_processes(ranks: Ranks) -> None:
    grids = [[[0, 5], [2, 3]], [[2, 0], [4, 4]], [[3, 1]]]
    case = replace(PLAIN, steps=[[grids, grids[::-1]]] * 2)
    answers = ranks.run(fixed_exchange.other_kernels, 3, given=asdict(case))
    assert answers == [{"wrong": {}, "verdicts": ["StepFitted(inactive_rank_hits=0)"] * 2}] * 3


def test_exchange_kernels_implement_the_protocol() -> None:
    form, transport = replace(PLAIN, steps=[[[[[0, 1]], [], []]]]).form(), TableWire(Table(3), 0)
    assert signature_differences(ExchangeKernels, CapturedKernels) == []
    for make in (TorchKernels, NaiveKernels):
        kernels = make(form, transport, device_allocator(torch.device("cpu")))
        assert isinstance(kernels, ExchangeKernels)
        assert signature_differences(ExchangeKernels, make) == []
        assert [room.index for room in kernels.buffer_sets] == list(range(len(kernels.buffer_sets)))
