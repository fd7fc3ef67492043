"""What one rank of a run does: joins the others, serves every variant, gathers the run's record.

Gathered sums are of parts that do not overlap, so that no row is counted twice.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from equipoise import __version__
from equipoise.balancer.experts.engine.states import RebalanceReport
from equipoise.balancer.experts.runtime.events import RebalanceRecord
from equipoise.balancer.formats import StatisticsRecorder
from equipoise.balancer.observe.trace_buffer import RecordedSpan, SlotCopy
from equipoise.connection import blame
from equipoise.demo.engine_options import engine_options
from equipoise.demo.grid import Grid
from equipoise.demo.live_feed import LiveFeed
from equipoise.demo.model import load_weights
from equipoise.demo.model.invariance import check_batch_invariance
from equipoise.demo.observers import Observers
from equipoise.demo.placement_file import check_same_placement, read_placement_file
from equipoise.demo.progress import RunProgress
from equipoise.demo.routing_recorder import RoutingRecorder
from equipoise.demo.run_context import RunContext
from equipoise.demo.run_record import (
    Counts,
    Rebalance,
    RunRecord,
    VariantRecord,
    restore_rebalance,
)
from equipoise.demo.scheduler import DIGEST_BYTES, RequestScheduler, outputs_digest
from equipoise.demo.serve_loop import PassMeasurements, ServeContext, serve_alone
from equipoise.demo.settings import RecordedContent, RecordingSettings, RunSettings, VariantName
from equipoise.demo.traffic import Traffic, load_phases
from equipoise.demo.variant import PassResult, Variant, serve_variant, variants_of_run
from equipoise.hal import registry
from equipoise.hal.accelerator import open_for_rank
from equipoise.hal.communicator import Communicator, Fabric, Rendezvous
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import OperationTimeout, StreamTimeout
from equipoise.hal.stream import Role
from equipoise.hal.subgroup import SubgroupFabric
from equipoise.machine import describe_machine


class Gatherer:
    """Sums over ranks on one communicator, each within `deadline` seconds; collective.

    Args:
        communicator: used for nothing else.
        device: where what travels has to be.
        deadline: seconds.
    """

    def __init__(self, communicator: Communicator, device: torch.device, deadline: float) -> None:
        self._communicator = communicator
        self._device = device
        self._deadline = deadline

    def rank_rows(self, meter: PassMeasurements, place: int, places: int) -> Counts:
        """(steps, layers, places): every rank's rows in the column of its place in its stage."""
        grid = torch.zeros((*meter.rows.shape, places), dtype=torch.int64)
        grid[..., place] = torch.from_numpy(meter.rows)
        return self._sum(grid).numpy()

    def expert_rows(self, meter: PassMeasurements) -> Counts:
        """(steps, layers, experts): what all ranks' tokens asked for."""
        return self._sum(torch.from_numpy(meter.experts.copy())).numpy()

    def slowest_step_seconds(
        self, meter: PassMeasurements
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """(steps,): seconds of the slowest rank."""
        own_seconds = torch.from_numpy(meter.seconds).view(torch.uint8).to(self._device)
        gathered = own_seconds.new_empty((self._communicator.size, *own_seconds.shape))
        self._communicator.all_gather(gathered, own_seconds).result(self._deadline)
        return gathered.cpu().view(torch.float64).amax(dim=0).numpy()

    def digests(self, finished: dict[int, bytes], requests: int) -> dict[int, bytes]:
        """Digest of every request, whichever rank served it."""
        table = torch.zeros((requests, DIGEST_BYTES), dtype=torch.int32)
        for number, digest in finished.items():
            table[number] = torch.tensor(list(digest), dtype=torch.int32)
        total = self._sum(table).to(torch.uint8)
        return {number: bytes(row) for number, row in enumerate(total.tolist())}

    def gather_texts(self, text: str) -> list[str]:
        """What every rank says, in order of rank; UTF-8 travels."""
        data = torch.tensor(list(text.encode()) or [0], dtype=torch.uint8)
        sizes = torch.zeros(self._communicator.size, dtype=torch.int64)
        sizes[self._communicator.rank] = len(text.encode())
        lengths = self._sum(sizes).tolist()
        buffer = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        buffer[: len(data)] = data[: len(buffer)]
        device_buffer = buffer.to(self._device)
        gathered = device_buffer.new_empty((self._communicator.size, len(device_buffer)))
        self._communicator.all_gather(gathered, device_buffer).result(self._deadline)
        rows = gathered.cpu().numpy()
        return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]

    def _sum(self, tensor: Tensor) -> Tensor:
        total = tensor.to(self._device)
        self._communicator.all_reduce(total).result(self._deadline)
        return total.cpu()


OPERATION_SHARE = 0.6
"""The part of the run's deadline that an operation may take; the rest is for what follows it."""
ATTRIBUTION_SHARE = 0.1
"""The part of the run's deadline to wait for evidence of which rank was lost."""


def serve_rank(
    settings: RunSettings, rendezvous: Rendezvous, progress: RunProgress
) -> RunRecord | None:
    """Serve every variant; rank 0 then serves alone as the oracle and returns the record.

    Raises:
        RankLost: a peer was killed, stopped or left; names it and the operation.
        EquipoiseError: anything else that ends the run.
    """
    fabric, where = _connect(settings, rendezvous)
    with _explain_failures(fabric.control, settings):
        run_context = _open_run(settings, fabric, where, progress)
        variants = variants_of_run(settings, run_context.serving.weights.config.experts)
        results = [(variant, *_serve(run_context, variant, progress)) for variant in variants]
    # The heartbeat goes on until the record is made, so that silence is noticed to the end.
    fabric.control.set_operation("the reference pass")
    record = None if where.rank else _record(run_context, results, progress)
    _close_run(run_context)
    return record


def record_rank(
    settings: RunSettings,
    recording: RecordingSettings,
    rendezvous: Rendezvous,
    progress: RunProgress,
) -> None:
    """Serve the last variant only, and write what this rank's tokens asked of the experts.

    When it returns every rank has written.

    Raises:
        RankLost: a peer was killed, stopped or left; names it and the operation.
        EquipoiseError: anything else that ends the run, or a file that cannot be written.
    """
    fabric, where = _connect(settings, rendezvous)
    with _explain_failures(fabric.control, settings):
        run_context = _open_run(settings, fabric, where, progress)
        variant = variants_of_run(settings, run_context.serving.weights.config.experts)[-1]
        recorder: StatisticsRecorder | RoutingRecorder
        if recording.content is RecordedContent.TOKENS:
            recorder = RoutingRecorder(
                recording.folder, run_context.rank, recording.steps, run_context.weights.config
            )
            _pass(replace(run_context, routing=recorder), variant, progress)
        else:
            recorder = _recorder(run_context, recording)
            _pass(run_context, variant, progress, recorder)
        fabric.control.set_operation("the writing of the recording")
        recorder.close()
        fabric.open("recorded").barrier().result(run_context.serving.deadline)
    _close_run(run_context)


def _connect(settings: RunSettings, rendezvous: Rendezvous) -> tuple[Fabric, Rendezvous]:
    torch.set_num_threads(1)
    where = replace(rendezvous, deadline=settings.deadline * OPERATION_SHARE)
    return registry.communicator(settings.communicator).connect(where), where


def _close_run(run_context: RunContext) -> None:
    run_context.observers.close()
    run_context.run_fabric.close()
    run_context.accelerator.close()


@contextmanager
def _explain_failures(control: ControlPlane, settings: RunSettings) -> Iterator[None]:
    """Whatever fails in here is explained by the loss of a rank, or by the deadline."""
    try:
        yield
    except Exception as error:
        cause = blame(control, error, settings.deadline * ATTRIBUTION_SHARE)
        if isinstance(cause, OperationTimeout | StreamTimeout):
            bound = f"{settings.deadline:g} s, of which an operation gets {OPERATION_SHARE:.0%}"
            cause = type(cause)(f"{cause}; on a busy machine raise --deadline (now {bound})")
        raise cause from error


def _open_run(
    settings: RunSettings, fabric: Fabric, rendezvous: Rendezvous, progress: RunProgress
) -> RunContext:
    """Open the accelerator, check what the oracle rests on, load weights and traffic."""
    accelerator = open_for_rank(registry.accelerator(settings.backend), rendezvous.rank)
    grid = Grid(rendezvous.size, settings.pipeline_ranks, settings.tensor_ranks)
    rank, weights = rendezvous.rank, load_weights().to(accelerator.device)
    within = _stage_fabric(fabric, grid)
    layers = grid.layers(rank, weights.config.layers)
    compute = accelerator.stream(Role.COMPUTE)
    compute.launch(lambda: check_batch_invariance(weights.config, accelerator.device))
    compute.synchronize(rendezvous.deadline)
    serving = ServeContext(
        weights=weights if grid.stages == 1 else weights.of_layers(layers),
        compute=compute,
        control=within.control,
        rank=within.control.rank,
        ranks=grid.ranks_per_stage,
        deadline=rendezvous.deadline,
    )
    traffic = Traffic(load_phases(settings.text), settings.steps, seed=settings.seed)
    layout = read_placement_file(settings, weights.config)
    if layout is not None:
        check_same_placement(
            layout, fabric.open("placement"), accelerator.device, rendezvous.deadline
        )
    forwards_per_step = 1 if grid.data_parallel_only else settings.forwards_per_step
    live = LiveFeed(progress.live, forwards_per_step) if settings.live and rank == 0 else None
    observers = Observers(settings, rank, live)
    return RunContext(
        settings,
        accelerator,
        fabric,
        within,
        rank,
        grid,
        weights,
        serving,
        traffic,
        observers,
        layout,
    )


def _stage_fabric(fabric: Fabric, grid: Grid) -> Fabric:
    """The ranks of this rank's stage, as a run of their own."""
    if grid.stages == 1:
        return fabric
    rank = fabric.control.rank
    return SubgroupFabric(fabric, f"stage {grid.stage(rank)}", grid.stage_ranks(rank))


def _recorder(run_context: RunContext, recording: RecordingSettings) -> StatisticsRecorder:
    config = run_context.serving.weights.config
    return StatisticsRecorder(
        recording.folder,
        rank=run_context.serving.rank,
        ranks=run_context.serving.ranks,
        iterations=recording.steps,
        layers=range(config.layers),
        experts=config.experts,
        top_k=config.top_k,
    )


Served = tuple[Variant, PassResult, VariantRecord, torch.Tensor, tuple[RecordedSpan, ...]]


def _pass(
    run_context: RunContext,
    variant: Variant,
    progress: RunProgress,
    recorder: StatisticsRecorder | None = None,
) -> PassResult:
    """Serve the whole traffic one way; each step is shown, and recorded where that is asked for."""
    if run_context.rank == 0:
        progress.variant(variant.name, run_context.traffic.steps)

    def watch(step: int, rows: Counts, imbalance: float) -> None:
        if recorder is not None:
            recorder.record(step, rows)
        # A live display is told by the event sinks, so that no step waits for the pipe to it.
        if run_context.rank == 0 and not run_context.settings.live:
            progress.step(step + 1, imbalance, "")

    return serve_variant(run_context, variant, watch)


def _serve(
    run_context: RunContext, variant: Variant, progress: RunProgress
) -> tuple[PassResult, VariantRecord, torch.Tensor, tuple[RecordedSpan, ...]]:
    """One pass, and what all ranks together made of it."""
    pass_result = _pass(run_context, variant, progress)
    run_context.serving.control.set_operation(f"gathering the results ({variant.name})")
    results = run_context.run_fabric.open(f"{variant.name}.results")
    gatherer = Gatherer(results, run_context.accelerator.device, run_context.serving.deadline)
    requests = run_context.traffic.steps * run_context.traffic.requests_per_step
    rebalances, aborts = _rebalances(run_context, pass_result, gatherer)
    record = VariantRecord(
        name=variant.name,
        rank_rows=gatherer.rank_rows(
            pass_result.meter, run_context.serving.rank, run_context.serving.ranks
        ),
        step_seconds=gatherer.slowest_step_seconds(pass_result.meter),
        rebalances=rebalances,
        aborts=dict(aborts),
        outputs=outputs_digest(gatherer.digests(pass_result.finished, requests)),
    )
    rows = torch.from_numpy(gatherer.expert_rows(pass_result.meter))
    return pass_result, record, rows, _spans(pass_result, gatherer)


def _rebalances(
    run_context: RunContext, pass_result: PassResult, gatherer: Gatherer
) -> tuple[tuple[Rebalance, ...], Counter[str]]:
    """How each ended, on every stage, and how many were aborted for what; they travel as JSON."""
    records = {record.number: record for record in pass_result.spans.rebalances}
    forwards_per_step = (
        1 if run_context.grid.data_parallel_only else run_context.settings.forwards_per_step
    )
    own_rebalances = [
        replace(
            _rebalance(report, records.get(report.number), forwards_per_step),
            moves=_moves(run_context, pass_result.spans.copies.get(report.number, ())),
        )
        for report in pass_result.reports
    ]
    own = {
        "rebalances": [asdict(rebalance) for rebalance in own_rebalances],
        "aborts": pass_result.aborts,
    }
    # The ranks of a stage say the same, so its first one is asked.
    stages = gatherer.gather_texts(json.dumps(own))[:: run_context.grid.ranks_per_stage]
    stage_results = [json.loads(text) for text in stages]
    rebalances = [
        restore_rebalance(rebalance) for stage in stage_results for rebalance in stage["rebalances"]
    ]
    aborts = sum((Counter(stage["aborts"]) for stage in stage_results), Counter[str]())
    return tuple(
        sorted(rebalances, key=lambda rebalance: (rebalance.step, rebalance.number))
    ), aborts


def _rebalance(
    report: RebalanceReport, record: RebalanceRecord | None, forwards_per_step: int
) -> Rebalance:
    """The engine counts forwards, of which a step has `forwards_per_step`."""
    return Rebalance(
        number=report.number,
        opened_at=report.opened_at // forwards_per_step,
        step=report.step // forwards_per_step,
        outcome=report.outcome,
        copies=report.copies,
        bytes_moved=report.bytes_moved,
        seconds=dict(record.phase_seconds) if record else {},
        before=record.imbalance_before if record else None,
        predicted=record.predicted_imbalance if record else None,
        actual=record.actual_imbalance if record else None,
    )


def _moves(
    run_context: RunContext, copies: tuple[SlotCopy, ...]
) -> tuple[tuple[int, int, int | None, int], ...]:
    """Copies by the run's layers and ranks; a stage counts its own from 0."""
    first_rank = run_context.grid.stage_ranks(run_context.rank)[0]
    first_layer = run_context.layers.start
    return tuple(
        (
            first_layer + copy.layer,
            copy.expert,
            None if copy.from_rank is None else first_rank + copy.from_rank,
            first_rank + copy.to_rank,
        )
        for copy in copies
    )


def _spans(pass_result: PassResult, gatherer: Gatherer) -> tuple[RecordedSpan, ...]:
    """What every rank did when; they travel as JSON."""
    own_spans = json.dumps([asdict(span) for span in pass_result.spans.spans])
    return tuple(
        RecordedSpan(**span)
        for text in gatherer.gather_texts(own_spans)
        for span in json.loads(text)
    )


def _record(run_context: RunContext, results: list[Served], progress: RunProgress) -> RunRecord:
    settings, config, traffic = (
        run_context.settings,
        run_context.weights.config,
        run_context.traffic,
    )
    reference = serve_alone(run_context.weights, traffic, progress)
    expert_rows = results[-1][3].numpy()
    last = results[-1][0]
    prompts, continuations = _samples(traffic, reference)
    return RunRecord(
        version=__version__,
        backend=settings.backend,
        communicator=settings.communicator,
        ranks=run_context.serving.ranks,
        stages=run_context.grid.stages,
        tensor_ranks=run_context.grid.tensor_parallel_size,
        layers=config.layers,
        experts=config.experts,
        top_k=config.top_k,
        slots=last.slots,
        steps=traffic.steps,
        shares="none" if last.name is VariantName.UNBALANCED else last.name,
        placement=run_context.layout.digest if run_context.layout else "",
        engine_options=engine_options(settings),
        phases=tuple(phase.name for phase in traffic.phases),
        switch_steps=traffic.switch_steps,
        step_tokens=expert_rows[:, 0].sum(axis=1) // config.top_k,
        expert_rows=expert_rows,
        variants={record.name: record for _, _, record, _, _ in results},
        reference_outputs=outputs_digest(reference.finished),
        prompts=prompts,
        continuations=continuations,
        spans=results[-1][4],
        levels=results[-1][1].spans.imbalance_samples,
        machine=describe_machine(),
    )


CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that no character begins with."""


def _samples(
    traffic: Traffic, scheduler: RequestScheduler
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The first prompt of each phase, and what the model wrote after it."""
    firsts = [traffic.arrivals(step)[0] for step in (0, *traffic.switch_steps)]
    pairs = [_as_text(request.prompt, scheduler.texts[request.id]) for request in firsts]
    return tuple(prompt for prompt, _ in pairs), tuple(text for _, text in pairs)


def _as_text(prompt: bytes, continuation: bytes) -> tuple[str, str]:
    """Both as text; a character that the prompt leaves unfinished goes with the continuation.

    A prompt is cut from a text at any byte: what is left of the character before it is dropped.
    """
    prompt = prompt.lstrip(CONTINUATION_BYTES)
    whole = (prompt + continuation).decode(errors="replace")
    pairs = zip(prompt.decode(errors="replace"), whole, strict=False)
    shared_length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return whole[:shared_length], whole[shared_length:]
