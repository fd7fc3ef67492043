"""Pipelines of toy stages, beside the same in one process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from helpers.rank_programs.call_outcome import outcome
from helpers.rank_programs.channels import place
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.hal.communicator import Fabric
from equipoise.pipeline.channel.endpoints import Receiver
from equipoise.pipeline.channel.schema import RowField, SchemaTemplate, SliceMode
from equipoise.pipeline.intermediate_tensors import AsyncIntermediateTensors
from equipoise.pipeline.stage import (
    SAMPLED_TOKENS,
    MicroBatch,
    PipelineSpec,
    StageChannels,
    StageLoop,
    open_stage_channels,
)

HOST = torch.device("cpu")
PRIME = 65_521
WIDTH = 4


class Toy:
    """Counts modulo a prime: a row is where its sequence's last token is, times what stages do.

    Args:
        stage: which one this is.
        stages: of how many.
        sizes: sequences of each micro-batch.
        in_flight: micro-batches between a token and the step that it goes into.
        raises_at: the micro-batch whose forward raises; -1 for none.
        device: where it computes.
        passing: stages between two others that hand on what came, where it came.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        sizes: Sequence[int],
        in_flight: int,
        raises_at: int = -1,
        device: torch.device = HOST,
        passing: Sequence[int] = (),
    ) -> None:
        self._stage = stage
        self._last = stage == stages - 1
        self._passes_on = stage > 0 and not self._last and stage in passing
        self._sizes = sizes
        self._in_flight = in_flight
        self._raises_at = raises_at
        self._device = device
        self.tokens: dict[int, list[int]] = {}
        self.calls: list[str] = []

    def begin(self, number: int) -> MicroBatch:
        self.calls.append(f"begin {number}")
        return MicroBatch(number, 2 * self._sizes[number], self._sizes[number])

    def around(self, number: int) -> AbstractContextManager[object]:
        return self._recorded_call(number)

    def forward(
        self, micro_batch: MicroBatch, inputs: AsyncIntermediateTensors | None
    ) -> Mapping[str, Tensor]:
        if micro_batch.number == self._raises_at:
            raise RuntimeError(f"stage {self._stage} cannot")
        if self._passes_on and inputs is not None:
            return {"hidden": inputs["hidden"], "residual": inputs["residual"]}
        x = self._first(micro_batch) if inputs is None else inputs["hidden"] + inputs["residual"]
        hidden = (x * 31 + self._stage + 1) % PRIME
        if not self._last:
            return {"hidden": hidden, "residual": hidden // 3}
        return {SAMPLED_TOKENS: (hidden.view(micro_batch.sequences, 2, WIDTH).sum((1, 2)) % PRIME)}

    def end(self, micro_batch: MicroBatch, tokens: Tensor | None) -> None:
        self.calls.append(f"end {micro_batch.number}")
        if tokens is not None:
            self.tokens[micro_batch.number] = tokens.tolist()

    def _first(self, micro_batch: MicroBatch) -> Tensor:
        """Rows made of the tokens of the micro-batch's predecessor, as far as it had sequences."""
        last_tokens = self.tokens.get(micro_batch.number - self._in_flight, [])
        tokens = (last_tokens + [7] * micro_batch.sequences)[: micro_batch.sequences]
        rows = torch.tensor(tokens, dtype=torch.int64).repeat_interleave(2)
        first = rows[:, None] * torch.arange(1, WIDTH + 1) + micro_batch.number
        return first.to(self._device)

    @contextmanager
    def _recorded_call(self, number: int) -> Iterator[None]:
        self.calls.append(f"enter {number}")
        yield
        self.calls.append(f"leave {number}")


def alone(
    stages: int, sizes: Sequence[int], in_flight: int, passing: Sequence[int] = ()
) -> list[list[int]]:
    """The tokens of every micro-batch, by one process that hands nothing over."""
    toys = [Toy(n, stages, sizes, in_flight, passing=passing) for n in range(stages)]
    for number in range(len(sizes)):
        inputs: AsyncIntermediateTensors | None = None
        micro_batch = MicroBatch(number, 2 * sizes[number], sizes[number])
        for toy in toys:
            inputs = AsyncIntermediateTensors(dict(toy.forward(micro_batch, inputs)))
        assert inputs is not None
        for toy in (toys[0], toys[-1]):
            toy.end(micro_batch, inputs[SAMPLED_TOKENS])
    return [toys[0].tokens[number] for number in range(len(sizes))]


class Watching(Toy):
    """A toy that looks at how many receives of tokens are posted whenever a micro-batch begins."""

    ends = StageChannels()

    def begin(self, number: int) -> MicroBatch:
        sampled = self.ends.tokens
        if isinstance(sampled, Receiver):
            self.calls.append(str(sampled.num_expected))
        return super().begin(number)


def receives_of_tokens(fabric: Fabric, sizes: list[int], serial: bool) -> Any:
    """How many are posted at the beginning of each micro-batch; groups may take turns."""
    rank, stages, in_flight = fabric.control.rank, fabric.control.size, 3
    with place(fabric, deadline=WATCHDOG) as at:
        fields = [RowField(name, (WIDTH,), torch.int64) for name in ("hidden", "residual")]
        pipeline = PipelineSpec(
            name="watched",
            ranks=tuple(range(stages)),
            template=SchemaTemplate(tuple(fields), max_rows=2 * max(sizes)),
            max_sequences=max(sizes),
            in_flight=in_flight,
            depth=in_flight,
        )
        toy = Watching(rank, stages, sizes, in_flight)
        toy.ends = open_stage_channels(pipeline, at)
        if serial and isinstance(toy.ends.tokens, Receiver):
            communicator: Any = toy.ends.tokens._edge.communicator
            declared = communicator.capabilities
            communicator.capabilities = replace(declared, independent_groups=False)
        StageLoop(toy, toy.ends, at.accelerator, at.stream, in_flight, WATCHDOG).run(len(sizes))
        return [int(call) for call in toy.calls if call.isdigit()]


def run_stages(
    fabric: Fabric,
    sizes: list[int],
    in_flight: int,
    depth: int,
    parts: int,
    raises: list[int],
    backend: str = "cpu",
    passing: Sequence[int] = (),
) -> Any:
    """Every rank is a stage, or, of two parts, every two ranks; stage `raises[0]` may fail."""
    rank, stages = fabric.control.rank, fabric.control.size // parts
    with place(fabric, parts=parts, deadline=WATCHDOG, backend=backend) as at:
        slice_mode = SliceMode.SLICED if parts > 1 else SliceMode.WHOLE
        fields = [
            RowField(name, (WIDTH,), torch.int64, slice_mode) for name in ("hidden", "residual")
        ]
        members = tuple(range(rank % parts, fabric.control.size, parts))
        pipeline = PipelineSpec(
            name=f"part {rank % parts}",
            ranks=members,
            template=SchemaTemplate(tuple(fields), max_rows=2 * max(sizes, default=0)),
            max_sequences=max(sizes, default=0),
            in_flight=in_flight,
            depth=depth,
        )
        raises_at = raises[1] if raises and raises[0] == rank // parts else -1
        toy = Toy(
            rank // parts, stages, sizes, in_flight, raises_at, at.accelerator.device, passing
        )
        ends = open_stage_channels(pipeline, at)
        loop = StageLoop(toy, ends, at.accelerator, at.stream, in_flight, WATCHDOG)
        run_outcome = outcome(lambda: loop.run(len(sizes)))
        messages = [end.statistics.messages for end in (ends.from_previous, ends.to_next) if end]
        return {
            "tokens": [toy.tokens.get(number) for number in range(len(sizes))],
            "calls": toy.calls,
            "error": run_outcome["error"],
            "text": run_outcome["text"],
            "messages": messages,
        }
