"""A captured decode is the plain one, bit for bit on the CPU, while experts move under it."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers.harnesses.devices import KINDS, backend
from helpers.watchdog import WATCHDOG
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.backends.cpu import BACKEND as CPU
from equipoise.balancer.experts.placement import ExpertShape, even_shares
from equipoise.balancer.experts.routing.layer_update import build_tables
from equipoise.balancer.experts.routing.levelled import LocalShareRouter
from equipoise.balancer.experts.routing.routers import TableRouter
from equipoise.demo.captured_decode import AllSlotsMoe, CapturedDecode
from equipoise.demo.expert_parallel import SlotWeights
from equipoise.demo.model import (
    Batch,
    Decoder,
    KVCache,
    LocalExperts,
    ModelConfig,
    Sequence,
    random_weights,
)
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.kernels import Tables
from equipoise.hal.slots import Segment, SlotLayout, SlotStore
from equipoise.hal.stream import Role

CONFIG = ModelConfig(layers=2, experts=4, top_k=2, hidden=16, heads=2, expert_width=8, context=24)
SHAPE = ExpertShape(layers=CONFIG.layers, experts=CONFIG.experts, slots=6, ranks=1)
WEIGHTS = random_weights(CONFIG, seed=3)
PROMPT, REQUESTS, STEPS = 5, (0, 3, 9), 6
ANY_PLACEMENT = st.lists(st.integers(0, 3), min_size=2, max_size=2).flatmap(
    lambda extra: st.permutations([*range(CONFIG.experts), *extra])
)


@pytest.fixture(
    params=["cpu", *KINDS],
    scope="module",
)
def accelerator(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    chosen_backend = CPU if request.param == "cpu" else backend(request.param)
    opened_device = chosen_backend.open(0)
    yield opened_device
    opened_device.close()


class Bench:
    """The model on one rank whose slots can be arranged anew at any step."""

    def __init__(
        self,
        accelerator: Accelerator,
        router_type: type[TableRouter] | type[LocalShareRouter] = TableRouter,
    ) -> None:
        device = accelerator.device
        self.stream = accelerator.stream(Role.COMPUTE)
        self._kernels = accelerator.kernels
        # As if they were three ranks: a router knows no others.
        self._tables = Tables.empty(*_sizes(), ranks=3, device=device)
        self._slots = SlotWeights(CONFIG, SHAPE.slots, device)
        self._stores = [self._store(accelerator, layer) for layer in range(CONFIG.layers)]
        counters = torch.zeros(CONFIG.layers, CONFIG.experts, dtype=torch.int32).to(device)
        router = router_type(accelerator, self._tables, 0, counters)
        weights = WEIGHTS.to(device)
        self.cache = KVCache(CONFIG, 10, device)
        moe = AllSlotsMoe(router, self._slots)
        self.decode = CapturedDecode(accelerator, weights, self.cache, moe, REQUESTS)
        self._decoder, self._local = Decoder(weights), LocalExperts(weights)

    def arrange(self, placement: list[int]) -> None:
        """Commit other experts to the slots, and the tables with them, without waiting."""
        for layer, store in enumerate(self._stores):
            source = [[WEIGHTS.gate_up[layer, e], WEIGHTS.down[layer, e]] for e in placement]
            store.write(range(SHAPE.slots), source, self.stream)
        rows = np.tile(np.array(placement, dtype=np.int32), (CONFIG.layers, 1))
        layers = range(CONFIG.layers)
        update = build_tables(rows, even_shares(rows, CONFIG.experts), SHAPE, layers)
        self._kernels.commit_tables(update, self._tables, self.stream)

    def prefill(self, seed: int) -> None:
        """Prompts into the cache, and the first token of each request."""
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(1, 256, (len(REQUESTS), PROMPT), generator=generator)
        batch = Batch(tuple(Sequence(r, p, 0) for r, p in zip(REQUESTS, prompts, strict=True)))

        def program() -> None:
            logits = self._decoder.forward(batch, self.cache, self._local)
            self.decode.tokens.copy_(logits[PROMPT - 1 :: PROMPT].max(-1).indices)
            self.decode.positions.fill_(PROMPT)

        self.stream.launch(program)
        self.stream.synchronize(WATCHDOG)

    def next(self) -> tuple[list[int], Tensor]:
        """One step: tokens and logits."""
        self.decode.step()
        self.stream.synchronize(WATCHDOG)
        return self.decode.tokens.tolist(), self.decode.logits.cpu().clone()

    def _store(self, accelerator: Accelerator, layer: int) -> SlotStore:
        pairs = zip(self._slots.gate_up[layer], self._slots.down[layer], strict=True)
        rows = tuple((Segment("gate_up", a), Segment("down", b)) for a, b in pairs)
        return accelerator.slot_store(SlotLayout(rows, staging=1))


def _sizes() -> tuple[int, int, int]:
    return SHAPE.layers, SHAPE.experts, SHAPE.slots


def plain(seed: int) -> Iterator[tuple[list[int], Tensor]]:
    """The same by ordinary forwards on the host, all experts in one place."""
    decoder, cache, moe = Decoder(WEIGHTS), KVCache(CONFIG, 10), LocalExperts(WEIGHTS)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 256, (len(REQUESTS), PROMPT), generator=generator)
    rows = tuple(Sequence(r, p, 0) for r, p in zip(REQUESTS, prompts, strict=True))
    logits = decoder.forward(Batch(rows), cache, moe)[PROMPT - 1 :: PROMPT]
    for place in range(PROMPT, PROMPT + STEPS):
        tokens = logits.max(-1).indices
        batch = tuple(Sequence(r, t[None], place) for r, t in zip(REQUESTS, tokens, strict=True))
        logits = decoder.forward(Batch(decode=batch), cache, moe)
        yield logits.max(-1).indices.tolist(), logits


@pytest.mark.parametrize("router_type", [TableRouter, LocalShareRouter])
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(ANY_PLACEMENT, min_size=STEPS, max_size=STEPS), st.integers(0, 99))
def test_captured_decode_equals_plain_under_commits(
    accelerator: Accelerator,
    router_type: type[TableRouter] | type[LocalShareRouter],
    placements: list[list[int]],
    seed: int,
) -> None:
    bench = Bench(accelerator, router_type)
    bench.arrange(placements[0])
    bench.prefill(seed)
    for placement, (tokens, logits) in zip(placements, plain(seed), strict=True):
        bench.arrange(placement)
        next_tokens, next_logits = bench.next()
        assert next_tokens == tokens
        if accelerator.device.type == "cpu":
            assert torch.equal(next_logits, logits)
        else:
            torch.testing.assert_close(next_logits, logits, rtol=1e-3, atol=1e-4)


def test_captured_decode_runs_nothing_before_first_step(accelerator: Accelerator) -> None:
    bench = Bench(accelerator)
    bench.arrange([0, 1, 2, 3, 0, 1])
    bench.prefill(0)
    history = bench.cache.history.cpu().clone()
    bench.stream.synchronize(WATCHDOG)
    assert torch.equal(bench.cache.history.cpu(), history)
    assert bench.decode.positions.tolist() == [PROMPT] * len(REQUESTS)
    bench.next()
    assert bench.decode.positions.tolist() == [PROMPT + 1] * len(REQUESTS)


def test_captured_decode_differs_with_stale_expert_weights(accelerator: Accelerator) -> None:
    """The oracle can fail: tables that name an expert whose weights never came."""
    bench = Bench(accelerator)
    bench.arrange([0, 1, 2, 3, 0, 1])
    bench.prefill(1)
    bench.arrange([3, 2, 1, 0, 0, 1])
    for layer, store in enumerate(bench._stores):
        other_weights = [[WEIGHTS.gate_up[layer, 1], WEIGHTS.down[layer, 1]]]
        store.write([0], other_weights, bench.stream)
    _, logits = bench.next()
    _, expected = next(plain(1))
    assert not torch.allclose(logits, expected, rtol=1e-3, atol=1e-4)
