"""This project's own loop of stages: the host launches ahead, and the stream computes.

The others' host receives, computes and sends in turn (`pipeline_stage.py`). Here a step is a
program of the compute stream, which waits for activations, computes and packs its output, while the
host prepares the next steps and posts their receives. Compute is the same timed wait, and the clock
of compute advances by all that the stream's thread does or waits for between two of them.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from emulated_device import now
from handover import DTYPE, Activations, Batch, Station
from pipeline_compute import Compute
from stamps import stamp, wrong
from token_return import TOKENS as SAMPLED
from torch import Tensor

from equipoise.hal.stream import Role
from equipoise.pipeline.opening import Place
from equipoise.pipeline.stage import TOKENS, StageLoop, Turn
from equipoise.pipeline.stage_ends import Pipeline, open_ends
from equipoise.pipeline.template import RowField, Template
from equipoise.pipeline.tensors import AsyncIntermediateTensors

FIELDS = ("hidden", "residual")


class LoopedStage(Compute):
    """Serves one run; see `equipoise.pipeline.stage.Stage`.

    Args:
        station: where.
    """

    def __init__(self, station: Station) -> None:
        super().__init__(station)
        self.messages = 1
        rank, last = station.rank, station.ranks - 1
        self._stream = station.accelerator.stream(Role.COMPUTE)
        self._from_last = last
        place = Place(
            fabric=station.fabric,
            accelerator=station.accelerator,
            stream=self._stream,
            deadline=station.deadline,
        )
        self._ends = open_ends(self._pipeline(), place)
        self._sampled = torch.empty(station.most, dtype=torch.int64)
        self._batches: list[Batch] = []
        self._rank = rank

    def run(self, batches: list[Batch]) -> None:
        """Every micro-batch, in order, until all has arrived everywhere."""
        station, self._batches = self._station, batches
        loop = StageLoop(
            self,
            self._ends,
            station.accelerator,
            self._stream,
            station.in_flight,
            station.deadline,
        )
        spent = time.process_time()
        self._clock.free = self._woken = now()
        loop.run(len(batches))
        self.cpu = time.process_time() - spent
        self._ends.close()

    def begin(self, number: int) -> Turn:
        """The schedule has told how many rows it has."""
        rows = self._batches[number].rows
        return Turn(number, rows, rows)

    def around(self, number: int) -> AbstractContextManager[object]:
        """Nothing."""
        return nullcontext()

    def forward(self, turn: Turn, handed: AsyncIntermediateTensors | None) -> Mapping[str, Tensor]:
        """A step's compute, around the wait for what it computes on."""
        batch = self._batches[turn.number]
        self.began.append(now())
        if handed is None:
            self._spend(batch.seconds)
        else:
            self._compute_on(batch, lambda: Activations(*(handed[name] for name in FIELDS)))
        self.ended.append(now())
        if self._station.is_last:
            tokens = self._sampled[: batch.rows]
            self._beside(lambda: stamp(tokens, batch.step, self._rank, SAMPLED))
            return {TOKENS: tokens}
        assert self._ends.after is not None
        lent = self._ends.after.outgoing(batch.rows)  # computed where it is sent from
        output = Activations(*(lent[name] for name in FIELDS))
        self._beside(lambda: self._stamp(output, batch))
        return dict(zip(FIELDS, output, strict=True))

    def end(self, turn: Turn, tokens: Tensor | None) -> None:
        """The first stage has the tokens of the step."""
        if tokens is not None and self._station.is_first:
            self.wrong += wrong(tokens, turn.number, self._from_last, SAMPLED)

    def _pipeline(self) -> Pipeline:
        station = self._station
        fields = tuple(RowField(name, (station.hidden,), DTYPE) for name in FIELDS)
        return Pipeline(
            name=station.label,
            ranks=tuple(range(station.ranks)),
            handed=Template(fields, station.most),
            sequences=station.most,
            in_flight=station.in_flight,
            depth=station.in_flight + 1,
        )
