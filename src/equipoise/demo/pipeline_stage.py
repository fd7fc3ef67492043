"""A pass of one rank over the traffic as a stage of a pipeline, with the channels of that stage."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.balancer.experts.runtime.events import EventSink, StepDone, now
from equipoise.demo.expert_parallel import SlicedMoe
from equipoise.demo.grid import Grid
from equipoise.demo.model import Batch, Decoder, KVCache, MoeLayer
from equipoise.demo.model.attention import plan_rows
from equipoise.demo.run_context import RunContext
from equipoise.demo.scheduler import RequestScheduler, RunningRequest, cache_slots, max_rows
from equipoise.demo.serve_loop import CountingMoe, PassMeasurements, ServeContext
from equipoise.demo.traffic import Traffic
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.stream import Stream
from equipoise.pipeline.channel.edge import EdgeContext, SliceGroup
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

HIDDEN = "hidden"


@dataclass(frozen=True)
class StageContext:
    """How a rank serves as a stage.

    Attributes:
        grid: roles of the ranks.
        rank: this one, of the run.
        micro_batches: into which a step's requests are divided: as many are in flight.
        ends: of its edges.
        accelerator: makes events.
        slices: ranks that serve the same requests; None where there is one.
    """

    grid: Grid
    rank: int
    micro_batches: int
    ends: StageChannels
    accelerator: Accelerator
    slices: Communicator | None

    def slice_moe(self, moe: MoeLayer, compute: Stream) -> MoeLayer:
        """Experts as this rank asks for them: for a slice of its rows, where others have them."""
        return moe if self.slices is None else SlicedMoe(moe, self.slices, compute)

    @property
    def scheduler_count(self) -> int:
        """Number of schedulers that the requests of a step are divided among."""
        return self.grid.data_parallel_size * self.micro_batches

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.grid.stage(self.rank) == 0

    @property
    def is_last(self) -> bool:
        """Whether it samples tokens."""
        return self.grid.stage(self.rank) == self.grid.stages - 1


def column_pipeline(
    grid: Grid, rank: int, traffic: Traffic, hidden: int, micro_batches: int, name: str
) -> PipelineSpec:
    """What this rank's column of stages hands over: float32 [rows, hidden].

    Args:
        grid: roles of the ranks.
        rank: of the run.
        traffic: says how many rows there can be in one micro-batch.
        hidden: width of the model.
        micro_batches: how many are in flight.
        name: no two pipelines of a run have one name.
    """
    schedulers = grid.data_parallel_size * micro_batches
    sequences = cache_slots(traffic, schedulers)
    split = SliceMode.SLICED if grid.tensor_parallel_size > 1 else SliceMode.WHOLE
    field = RowField(HIDDEN, (hidden,), torch.float32, split)
    return PipelineSpec(
        name=f"{name} {rank % grid.ranks_per_stage}",
        ranks=grid.column(rank),
        template=SchemaTemplate((field,), max_rows=max_rows(traffic, schedulers)),
        max_sequences=sequences,
        in_flight=micro_batches,
        depth=micro_batches + 1,
    )


@contextmanager
def open_stage(run_context: RunContext, name: str) -> Iterator[StageContext]:
    """The rank's way through a pass, with its edges and communicators; collective of all ranks."""
    grid, rank, micro_batches = (
        run_context.grid,
        run_context.rank,
        run_context.settings.forwards_per_step,
    )
    members = grid.slices(rank)
    communicators = [
        run_context.run_fabric.open(f"{name}.{purpose} of {members[0]}", members)
        for purpose in ("gathering", "comparing", "rows")
        if grid.tensor_parallel_size > 1
    ]
    place = EdgeContext(
        fabric=run_context.run_fabric,
        accelerator=run_context.accelerator,
        stream=run_context.serving.compute,
        deadline=run_context.serving.deadline,
        slice_group=SliceGroup(communicators[0], communicators[1]) if communicators else None,
    )
    hidden = run_context.weights.config.hidden
    pipeline = column_pipeline(
        grid, rank, run_context.traffic, hidden, micro_batches, f"{name}, column"
    )
    ends = open_stage_channels(pipeline, place)
    yield StageContext(
        grid,
        rank,
        micro_batches,
        ends,
        run_context.accelerator,
        communicators[2] if communicators else None,
    )
    ends.close()
    for communicator in communicators:
        communicator.close()


@dataclass
class _UnderWay:
    """Rows of a micro-batch, and its logits where computed: float32 [rows, vocabulary]."""

    batch: Batch
    logits: Tensor | None = None


@dataclass
class ModelStage:
    """What one rank computes of the model; see `Stage`.

    Attributes:
        serving: where it serves; the weights are of its layers only.
        context: how.
        traffic: what is served.
        moe: the experts of its layers.
        meter: counts.
        around_step: entered around the launch of a forward, with its number.
        watch: called after each step.
        name: of what is served.
        events: gets an event per step.
        finished: digest by request id, on the ranks that sample; of every request once.
    """

    serving: ServeContext
    context: StageContext
    traffic: Traffic
    moe: MoeLayer
    meter: PassMeasurements
    around_step: Callable[[int], AbstractContextManager[None]]
    watch: Callable[[int], None]
    name: str
    events: EventSink
    finished: dict[int, bytes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        context, weights = self.context, self.serving.weights
        micro, count = context.micro_batches, context.scheduler_count
        first = context.grid.group(context.rank) * micro
        slots = cache_slots(self.traffic, count)
        self._counting = CountingMoe(self.moe, self.meter)
        self._decoder = Decoder(weights)
        self._schedulers = [
            RequestScheduler(self.traffic, first + number, count) for number in range(micro)
        ]
        self._caches = [KVCache(weights.config, slots, weights.device) for _ in range(micro)]
        self._under_way: dict[int, _UnderWay] = {}
        self._began = now()

    def run(self) -> dict[int, bytes]:
        """Serve every step; returns the digest of every request that was sampled for here.

        Raises what `StageLoop.run` raises.
        """
        context, deadline = self.context, self.serving.deadline * 2
        loop = StageLoop(
            self,
            context.ends,
            context.accelerator,
            self.serving.compute,
            context.micro_batches,
            deadline,
        )
        loop.run(self.traffic.steps * context.micro_batches)
        if context.is_last and context.grid.slice(context.rank) == 0:
            for scheduler in self._schedulers:
                scheduler.close()
                self.finished |= scheduler.finished
        return self.finished

    @property
    def newest_request(self) -> RunningRequest | None:
        """The last request of this rank's first micro-batch that was admitted."""
        return self._schedulers[0].newest

    def begin(self, number: int) -> MicroBatch:
        """See `Stage`."""
        step, micro = divmod(number, self.context.micro_batches)
        batch = self._schedulers[micro].next_batch(step)
        self._under_way[number] = _UnderWay(batch)
        return MicroBatch(number, batch.rows, len(list(batch)))

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """See `Stage`."""
        enter, step = self.serving.control.set_operation, number // self.context.micro_batches
        enter(f"the vote before step {step} ({self.name})")
        with self.around_step(number):
            enter(f"step {step} ({self.name})")
            yield

    def forward(
        self, micro_batch: MicroBatch, inputs: AsyncIntermediateTensors | None
    ) -> Mapping[str, Tensor]:
        """See `Stage`."""
        self.meter.step, micro = divmod(micro_batch.number, self.context.micro_batches)
        self.meter.forward_number = micro_batch.number
        under_way, cache = self._under_way[micro_batch.number], self._caches[micro]
        plan = plan_rows(under_way.batch, cache)
        x = self._decoder.embed(plan, cache) if inputs is None else inputs[HIDDEN]
        layers = range(self.serving.weights.config.layers)
        x = self._decoder.run_layers(layers, x, plan, cache, self._counting)
        if not self.context.is_last:
            return {HIDDEN: x}
        under_way.logits = self._decoder.head(x)
        return {SAMPLED_TOKENS: _sampled(under_way.batch, under_way.logits)}

    def end(self, micro_batch: MicroBatch, tokens: Tensor | None) -> None:
        """See `Stage`."""
        step, micro = divmod(micro_batch.number, self.context.micro_batches)
        under_way, scheduler = self._under_way.pop(micro_batch.number), self._schedulers[micro]
        if under_way.logits is not None:
            scheduler.add_logits(under_way.batch, under_way.logits.cpu())
        else:
            token_ids = [0] * micro_batch.sequences if tokens is None else tokens.tolist()
            scheduler.add_tokens(under_way.batch, token_ids)
        if micro == self.context.micro_batches - 1:
            self._close_step(step)

    def _close_step(self, step: int) -> None:
        end = now()
        self.meter.seconds[step] = end - self._began
        self.events.emit(StepDone(step, self._began, end))
        self._began = end
        self.watch(step)


def _sampled(batch: Batch, logits: Tensor) -> Tensor:
    """The likeliest next token of each sequence, int64 [sequences], as schedulers choose it."""
    lengths = torch.tensor([len(sequence.tokens) for sequence in batch], dtype=torch.int64)
    last = (lengths.cumsum(0) - 1).to(logits.device)
    return logits[last].argmax(-1)
