"""What one rank of a run does, from meeting the others to the record of the run."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import takewhile

import torch

from equipoise import __version__
from equipoise.balancer.experts.engine.states import RebalanceReport
from equipoise.balancer.experts.runtime.events import RebalanceRecord
from equipoise.balancer.formats import Recorder
from equipoise.balancer.observe.spans import Traced
from equipoise.connection import blame
from equipoise.demo.gather import Gatherer
from equipoise.demo.given import agree, read_given
from equipoise.demo.grid import Grid
from equipoise.demo.machine import describe_machine
from equipoise.demo.model import load_weights
from equipoise.demo.model.invariance import check_batch_invariance
from equipoise.demo.observers import Observers
from equipoise.demo.progress import Progress
from equipoise.demo.record import Counts, Epoch, RunRecord, VariantRecord
from equipoise.demo.reference import serve_alone
from equipoise.demo.requests import Desk, outputs_digest
from equipoise.demo.serve import Post
from equipoise.demo.settings import Recording, RunSettings, VariantName
from equipoise.demo.site import Site
from equipoise.demo.told import told
from equipoise.demo.traffic import Traffic, load_phases
from equipoise.demo.variant import Pass, Variant, serve_variant, variants
from equipoise.hal import registry
from equipoise.hal.accelerator import open_for
from equipoise.hal.communicator import Fabric, Rendezvous
from equipoise.hal.control import ControlPlane
from equipoise.hal.grouping import GroupFabric
from equipoise.hal.stream import Role

OPERATIONS = 0.6
"""The part of the run's deadline that an operation may take; the rest is for what follows it."""
ATTRIBUTION = 0.1
"""The part of the run's deadline to wait for evidence of who was lost."""


def serve_rank(
    settings: RunSettings, rendezvous: Rendezvous, progress: Progress
) -> RunRecord | None:
    """Serve every variant; rank 0 then serves alone as the oracle and returns the record.

    Raises:
        RankLost: a peer was killed, stopped or left; names it and the operation.
        EquipoiseError: anything else that ends the run.
    """
    fabric, where = _meet(settings, rendezvous)
    with _blaming(fabric.control, settings):
        site = _settle_in(settings, fabric, where)
        ways = variants(settings, site.post.weights.config.experts)
        served = [(way, *_serve(site, way, progress)) for way in ways]
    # The heartbeat goes on until the record is made, so that silence is noticed to the end.
    fabric.control.enter("the reference pass")
    record = None if where.rank else _record(site, served, progress)
    _part(site)
    return record


def record_rank(
    settings: RunSettings, recording: Recording, rendezvous: Rendezvous, progress: Progress
) -> None:
    """Serve the last variant only, and write what this rank's tokens asked of each expert.

    When it returns every rank has written.

    Raises:
        RankLost: a peer was killed, stopped or left; names it and the operation.
        EquipoiseError: anything else that ends the run, or a file that cannot be written.
    """
    fabric, where = _meet(settings, rendezvous)
    with _blaming(fabric.control, settings):
        site = _settle_in(settings, fabric, where)
        recorder = _recorder(site, recording)
        _pass(site, variants(settings, site.post.weights.config.experts)[-1], progress, recorder)
        fabric.control.enter("the writing of statistics")
        recorder.close()
        fabric.open("recorded").barrier().result(site.post.deadline)
    _part(site)


def _meet(settings: RunSettings, rendezvous: Rendezvous) -> tuple[Fabric, Rendezvous]:
    torch.set_num_threads(1)
    where = replace(rendezvous, deadline=settings.deadline * OPERATIONS)
    return registry.communicator(settings.communicator).connect(where), where


def _part(site: Site) -> None:
    site.observers.close()
    site.run.close()
    site.accelerator.close()


@contextmanager
def _blaming(control: ControlPlane, settings: RunSettings) -> Iterator[None]:
    """Whatever fails in here is explained by the loss of a rank, where there was one."""
    try:
        yield
    except Exception as error:
        raise blame(control, error, settings.deadline * ATTRIBUTION) from error


def _settle_in(settings: RunSettings, fabric: Fabric, rendezvous: Rendezvous) -> Site:
    """Open the accelerator, check what the oracle rests on, load weights and traffic."""
    accelerator = open_for(registry.accelerator(settings.backend), rendezvous.rank)
    grid = Grid(rendezvous.size, settings.pipeline_ranks, settings.tensor_ranks)
    rank, weights = rendezvous.rank, load_weights().to(accelerator.device)
    within = _stage_fabric(fabric, grid)
    layers = grid.layers(rank, weights.config.layers)
    compute = accelerator.stream(Role.COMPUTE)
    compute.launch(lambda: check_batch_invariance(weights.config, accelerator.device))
    compute.synchronize(rendezvous.deadline)
    post = Post(
        weights=weights if grid.stages == 1 else weights.of_layers(layers),
        compute=compute,
        control=within.control,
        rank=within.control.rank,
        ranks=grid.per_stage,
        deadline=rendezvous.deadline,
    )
    traffic = Traffic(load_phases(settings.text), settings.steps, seed=settings.seed)
    layout = read_given(settings, weights.config)
    if layout is not None:
        agree(layout, fabric.open("placement"), accelerator.device, rendezvous.deadline)
    observers = Observers(settings, rank)
    return Site(
        settings,
        accelerator,
        fabric,
        within,
        rank,
        grid,
        weights,
        post,
        traffic,
        observers,
        layout,
    )


def _stage_fabric(fabric: Fabric, grid: Grid) -> Fabric:
    """The ranks of this rank's stage, as a run of their own."""
    if grid.stages == 1:
        return fabric
    rank = fabric.control.rank
    return GroupFabric(fabric, f"stage {grid.stage(rank)}", grid.stage_ranks(rank))


def _recorder(site: Site, recording: Recording) -> Recorder:
    config = site.post.weights.config
    return Recorder(
        recording.folder,
        rank=site.post.rank,
        ranks=site.post.ranks,
        iterations=recording.steps,
        layers=range(config.layers),
        experts=config.experts,
        top_k=config.top_k,
    )


Served = tuple[Variant, Pass, VariantRecord, torch.Tensor, tuple[Traced, ...]]


def _pass(
    site: Site, variant: Variant, progress: Progress, recorder: Recorder | None = None
) -> Pass:
    """Serve the whole traffic one way; each step is shown, and recorded where that is asked for."""
    if site.rank == 0:
        progress.variant(variant.name, site.traffic.steps)

    def watch(step: int, rows: Counts, imbalance: float) -> None:
        if recorder is not None:
            recorder.record(step, rows)
        if site.rank == 0:
            progress.step(step + 1, imbalance, "")

    return serve_variant(site, variant, watch)


def _serve(
    site: Site, variant: Variant, progress: Progress
) -> tuple[Pass, VariantRecord, torch.Tensor, tuple[Traced, ...]]:
    """One pass, and what all ranks together made of it."""
    done = _pass(site, variant, progress)
    site.post.control.enter(f"gathering the results ({variant.name})")
    results = site.run.open(f"{variant.name}.results")
    gatherer = Gatherer(results, site.accelerator.device, site.post.deadline)
    requests = site.traffic.steps * site.traffic.requests_per_step
    epochs, aborts = _epochs(site, done, gatherer)
    record = VariantRecord(
        name=variant.name,
        rank_rows=gatherer.rank_rows(done.meter, site.post.rank, site.post.ranks),
        step_seconds=gatherer.slowest(done.meter),
        epochs=epochs,
        aborts=dict(aborts),
        outputs=outputs_digest(gatherer.digests(done.finished, requests)),
    )
    rows = torch.from_numpy(gatherer.expert_rows(done.meter))
    return done, record, rows, _spans(done, gatherer)


def _epochs(site: Site, done: Pass, gatherer: Gatherer) -> tuple[tuple[Epoch, ...], Counter[str]]:
    """How each ended, on every stage, and how many were aborted for what; they travel as JSON."""
    known = {record.number: record for record in done.spans.epochs}
    turns = 1 if site.grid.alone else site.settings.turns
    mine = [_epoch(report, known.get(report.number), turns) for report in done.reports]
    said = {"epochs": [asdict(epoch) for epoch in mine], "aborts": done.aborts}
    # The ranks of a stage say the same, so its first one is asked.
    stages = gatherer.texts(json.dumps(said))[:: site.grid.per_stage]
    told = [json.loads(text) for text in stages]
    epochs = [Epoch(**epoch) for stage in told for epoch in stage["epochs"]]
    aborts = sum((Counter(stage["aborts"]) for stage in told), Counter[str]())
    return tuple(sorted(epochs, key=lambda epoch: (epoch.step, epoch.number))), aborts


def _epoch(report: RebalanceReport, known: RebalanceRecord | None, turns: int) -> Epoch:
    """The engine counts forwards, of which a step has `turns`."""
    return Epoch(
        number=report.number,
        planned_at=report.opened // turns,
        step=report.step // turns,
        outcome=report.outcome,
        slots_moved=report.slots,
        bytes_moved=report.bytes,
        seconds=dict(known.seconds) if known else {},
        before=known.before if known else None,
        predicted=known.predicted if known else None,
        actual=known.actual if known else None,
    )


def _spans(done: Pass, gatherer: Gatherer) -> tuple[Traced, ...]:
    """What every rank did when; they travel as JSON."""
    mine = json.dumps([asdict(span) for span in done.spans.spans])
    return tuple(Traced(**span) for text in gatherer.texts(mine) for span in json.loads(text))


def _record(site: Site, served: list[Served], progress: Progress) -> RunRecord:
    settings, config, traffic = site.settings, site.weights.config, site.traffic
    reference = serve_alone(site.weights, traffic, progress)
    expert_rows = served[-1][3].numpy()
    last = served[-1][0]
    prompts, continuations = _samples(traffic, reference)
    return RunRecord(
        version=__version__,
        backend=settings.backend,
        communicator=settings.communicator,
        ranks=site.post.ranks,
        stages=site.grid.stages,
        tensor_ranks=site.grid.tensor,
        layers=config.layers,
        experts=config.experts,
        top_k=config.top_k,
        slots=last.slots,
        steps=traffic.steps,
        shares="none" if last.name is VariantName.UNBALANCED else last.name,
        placement=site.layout.digest if site.layout else "",
        engine=told(settings),
        phases=tuple(phase.name for phase in traffic.phases),
        switch_steps=traffic.switch_steps,
        step_tokens=expert_rows[:, 0].sum(axis=1) // config.top_k,
        expert_rows=expert_rows,
        variants={record.name: record for _, _, record, _, _ in served},
        reference_outputs=outputs_digest(reference.finished),
        prompts=prompts,
        continuations=continuations,
        spans=served[-1][4],
        levels=served[-1][1].spans.levels,
        machine=describe_machine(),
    )


def _samples(traffic: Traffic, desk: Desk) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The first prompt of each phase, and what the model wrote after it."""
    firsts = [traffic.arrivals(step)[0] for step in (0, *traffic.switch_steps)]
    pairs = [_as_text(request.prompt, desk.texts[request.id]) for request in firsts]
    return tuple(prompt for prompt, _ in pairs), tuple(text for _, text in pairs)


def _as_text(prompt: bytes, continuation: bytes) -> tuple[str, str]:
    """Both as text; a character that the prompt leaves unfinished goes with the continuation."""
    whole = (prompt + continuation).decode(errors="replace")
    pairs = zip(prompt.decode(errors="replace"), whole, strict=False)
    kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return whole[:kept], whole[kept:]
