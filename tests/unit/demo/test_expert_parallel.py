"""Logits do not depend on where experts live, nor on how many ranks there are: `torch.equal`."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from helpers.processes.thread_ranks import GroupMember, on_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.backends.cpu.gloo_communicator import GlooCommunicator
from equipoise.balancer.experts.balancer import NO_REBALANCING, ExpertBalancer, open_balancer
from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    Placement,
    even_shares,
    solve_shares,
)
from equipoise.demo.expert_parallel import (
    ExpertParallel,
    FixedCapacityDispatcher,
    PortableDispatcher,
    SlotWeights,
    TokenDispatcher,
    fixed_exchange,
)
from equipoise.demo.model import (
    Batch,
    Decoder,
    KVCache,
    LocalExperts,
    ModelConfig,
    Sequence,
    random_weights,
)
from equipoise.demo.settings import ExchangeForm
from equipoise.hal.stream import Role
from equipoise.pipeline.all_to_all.formats import ExchangeFormat, RowFormat
from equipoise.pipeline.all_to_all.variable_size import VariableSizeExchange

CONFIG = ModelConfig(layers=2, experts=8, top_k=3, hidden=64, heads=2, expert_width=24, context=32)
WEIGHTS = random_weights(CONFIG, seed=7)
PROMPTS = [
    torch.randint(1, 256, (12,), generator=torch.Generator().manual_seed(seed)) for seed in range(4)
]
ENGINE = BalancerConfig(
    name="t", shares=ShareMode.STATIC, window_size=2, step_interval=4, sub_window=2
)


@dataclass
class Clock:
    forward_number: int = 0


def sequences(numbers: list[int], start: int, stop: int) -> tuple[Sequence, ...]:
    return tuple(Sequence(i, PROMPTS[n][start:stop], start) for i, n in enumerate(numbers))


@pytest.fixture(scope="module")
def reference() -> list[Tensor]:
    """Logits of each prompt, prefilled and continued alone in one process."""
    return [
        torch.cat(prompt_logits)
        for prompt_logits in (serve(LocalExperts(WEIGHTS), [n]) for n in range(len(PROMPTS)))
    ]


def serve(moe: LocalExperts | ExpertParallel, numbers: list[int]) -> list[Tensor]:
    """Prefill 10 bytes of each prompt, then feed the next two one by one; logits by request."""
    decoder, cache = Decoder(WEIGHTS), KVCache(CONFIG, 4)
    batches = [
        Batch(prefill=sequences(numbers, 0, 10)),
        Batch(decode=sequences(numbers, 10, 11)),
        Batch(decode=sequences(numbers, 11, 12)),
    ]
    rows: list[list[Tensor]] = [[] for _ in numbers]
    for batch in batches:
        logits = decoder.forward(batch, cache, moe)
        parts = torch.split(logits, [len(sequence.tokens) for sequence in batch])
        for request, part in zip(rows, parts, strict=True):
            request.append(part)
    return [torch.cat(request) for request in rows]


def dispatcher_of(
    member: GroupMember, form: ExchangeForm, balancer: ExpertBalancer
) -> TokenDispatcher:
    """Either form, on communicators of its own."""
    compute, line = member.accelerator.stream(Role.COMPUTE), member.fabric.open("experts")
    shape = balancer.shape
    if form is ExchangeForm.PORTABLE:
        portable = VariableSizeExchange(line, shape.slots_per_rank, compute, 20.0)
        return PortableDispatcher(portable, balancer.router.dispatch_counts)
    row = RowFormat((CONFIG.hidden,), torch.float32)
    exchange_format = ExchangeFormat.without_overflow(
        shape.ranks, shape.slots_per_rank, 0, 10 * len(PROMPTS), CONFIG.top_k, [row], row
    )
    exchange = fixed_exchange(line, member.accelerator, exchange_format, 20.0)
    return FixedCapacityDispatcher(exchange, CONFIG.layers, compute, 20.0)


def serve_on(
    member: GroupMember,
    layout: Layout,
    shape: ExpertShape,
    placement: Placement,
    form: ExchangeForm = ExchangeForm.PORTABLE,
    shares: ShareMode = ShareMode.STATIC,
) -> list[Tensor]:
    """This rank's share of the prompts; the slots hold `placement`, the tables say `layout`."""
    weights = SlotWeights(CONFIG, shape.slots_per_rank)
    compute = member.accelerator.stream(Role.COMPUTE)
    _fill(member, weights, placement, shape)
    store = member.accelerator.slot_store(weights.layer_group().layout(staging=0))
    ends = member.accelerator, member.fabric, store
    balancer = open_balancer(*ends, shape, layout, replace(ENGINE, shares=shares), NO_REBALANCING)
    moe = ExpertParallel(
        balancer.router,
        balancer.serving_state.generation,
        dispatcher_of(member, form, balancer),
        weights,
        Clock(),
        balancer.reading_slots,
        lambda layer, rows: None,
    )
    logits: list[list[Tensor]] = []
    mine = list(range(member.rank, len(PROMPTS), member.size))
    compute.launch(lambda: logits.append(serve(moe, mine)))
    compute.synchronize(60.0)
    return logits[0]


def _fill(
    member: GroupMember, weights: SlotWeights, placement: Placement, shape: ExpertShape
) -> None:
    first = member.rank * shape.slots_per_rank
    for layer, row in enumerate(placement[:, first : first + shape.slots_per_rank]):
        for slot, expert in enumerate(row):
            weights.gate_up[layer, slot] = WEIGHTS.gate_up[layer, expert]
            weights.down[layer, slot] = WEIGHTS.down[layer, expert]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ExpertShape, Layout]:
    ranks = draw(st.sampled_from([1, 2, 4]))
    per_rank = draw(st.integers(8 // ranks, 8 // ranks + 3))
    shape = ExpertShape(CONFIG.layers, CONFIG.experts, ranks * per_rank, ranks)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    placement = np.stack([_placement(random, shape) for _ in range(shape.layers)])
    load = random.integers(0, 100, (shape.layers, shape.experts))
    return shape, Layout(placement, solve_shares(load, placement, shape))


def _placement(random: np.random.Generator, shape: ExpertShape) -> Placement:
    spare = random.integers(0, shape.experts, shape.slots - shape.experts)
    return random.permutation(np.concatenate([np.arange(shape.experts), spare])).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("form", ExchangeForm)
@given(layouts())
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_expert_parallel_logits_equal_single_process(
    reference: list[Tensor], form: ExchangeForm, case: tuple[ExpertShape, Layout]
) -> None:
    shape, layout = case
    by_rank = on_ranks(
        shape.ranks, lambda member: serve_on(member, layout, shape, layout.placement, form)
    )
    assert all(equal(by_rank, reference))


@pytest.mark.parametrize("form", ExchangeForm)
def test_expert_parallel_logits_differ_with_wrong_expert(
    reference: list[Tensor], form: ExchangeForm
) -> None:
    shape = ExpertShape(CONFIG.layers, CONFIG.experts, 8, 2)
    placement = np.tile(np.arange(8, dtype=np.int32), (CONFIG.layers, 1))
    shares = np.full_like(placement, 65536)
    false = placement.copy()
    false[1, [2, 3]] = [3, 2]
    by_rank = on_ranks(
        2, lambda member: serve_on(member, Layout(placement, shares), shape, false, form)
    )
    assert not all(equal(by_rank, reference))


def test_expert_parallel_with_exact_shares_swaps_no_sizes(
    reference: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The portable exchange takes the router's counts: nothing but rows goes over all-to-all."""
    shape = ExpertShape(CONFIG.layers, CONFIG.experts, 12, 2)
    placement = np.tile(np.arange(12, dtype=np.int32) % 8, (CONFIG.layers, 1))
    layout = Layout(placement, even_shares(placement, CONFIG.experts))

    def sizes(*arguments: Tensor) -> None:
        raise AssertionError("sizes are exchanged")

    monkeypatch.setattr(GlooCommunicator, "all_to_all", sizes)
    by_rank = on_ranks(
        2, lambda member: serve_on(member, layout, shape, placement, shares=ShareMode.EXACT)
    )
    assert all(equal(by_rank, reference))


def equal(by_rank: list[list[Tensor]], reference: list[Tensor]) -> list[bool]:
    """For each answer of each rank, whether it has the reference's bits."""
    return [
        torch.equal(answer, reference[number])
        for rank, answers in enumerate(by_rank)
        for answer, number in zip(answers, range(rank, 4, len(by_rank)), strict=True)
    ]
