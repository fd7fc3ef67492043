"""The ways in which a run serves its traffic, and one rank's part in serving it one way."""

from collections.abc import Callable
from dataclasses import dataclass

from equipoise.balancer.experts.balancer import (
    AtBoundary,
    CommitPath,
    ExpertBalancer,
    UnderLock,
    open_balancer,
    open_static,
)
from equipoise.balancer.experts.config import CommitMode, EngineConfig, ShareMode
from equipoise.balancer.experts.engine import EpochReport
from equipoise.balancer.experts.expert_model import Family
from equipoise.balancer.experts.layout import Layout, even_shares
from equipoise.balancer.experts.placement import Placement, Shape, contiguous
from equipoise.balancer.experts.writers import StreamWriter, Supply
from equipoise.demo.model import HOST
from equipoise.demo.moe import ExpertParallel, HostWeights, SlotWeights
from equipoise.demo.record import Counts
from equipoise.demo.requests import Desk
from equipoise.demo.serve import Meter, Post, ServeLoop
from equipoise.demo.settings import Balance, RunSettings
from equipoise.demo.traffic import Traffic
from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric
from equipoise.hal.slots import SlotStore
from equipoise.pipeline.exchange import ExpertExchange

Watch = Callable[[int, Counts, float], None]
"""Told after each step: its number, this rank's (layers, experts) rows, the imbalance last seen."""
UNBALANCED = "unbalanced"
PLACEMENT = "placement"
LAYERS_IN_FLIGHT = 2
"""Staging is enough for so many layers of which every slot changes."""


@dataclass(frozen=True)
class Variant:
    """One pass over the traffic; `name` is `unbalanced`, `placement`, or a share mode."""

    name: str
    slots: int

    @property
    def balanced(self) -> bool:
        """Whether an engine runs."""
        return self.name not in (UNBALANCED, PLACEMENT)


def variants(settings: RunSettings, experts: int) -> tuple[Variant, ...]:
    """What a run serves, in order: without balancing, then each share mode, the asked one last;
    or, where a placement was given, that one."""
    still = Variant(UNBALANCED, experts)
    if settings.placement is not None:
        return still, Variant(PLACEMENT, settings.slots)
    if settings.balance is Balance.OFF:
        return (still,)
    others = [mode for mode in ShareMode if mode is not settings.shares]
    return (still, *(Variant(mode, settings.slots) for mode in (*others, settings.shares)))


@dataclass(frozen=True)
class Pass:
    """What one rank brings home from one pass."""

    meter: Meter
    desk: Desk
    reports: tuple[EpochReport, ...]
    aborts: dict[str, int]


@dataclass(frozen=True)
class Site:
    """All that outlives a pass on one rank."""

    settings: RunSettings
    accelerator: Accelerator
    fabric: Fabric
    post: Post
    traffic: Traffic
    layout: Layout | None
    """What was given to be served unchanged; None where nothing was."""

    def shape(self, variant: Variant) -> Shape:
        """Of the model under a variant's number of slots."""
        config = self.post.weights.config
        return Shape(config.layers, config.experts, variant.slots, self.post.ranks)


def serve_variant(site: Site, variant: Variant, watch: Watch) -> Pass:
    """Serve the whole traffic one way; collective."""
    site.post.control.enter(f"the opening of communicators ({variant.name})")
    shape = site.shape(variant)
    weights = SlotWeights(site.post.weights.config, shape.slots_per_rank, site.accelerator.device)
    balancer = _open(site, variant, weights, shape)
    meter = Meter.sized(site.traffic.steps, shape.layers, shape.experts)
    experts = site.fabric.open(f"{variant.name}.experts")
    compute, deadline = site.post.compute, site.post.deadline
    exchange = ExpertExchange(experts, shape.slots_per_rank, compute, deadline)
    moe = ExpertParallel(
        balancer.router,
        balancer.installed.generation,
        exchange,
        weights,
        meter,
        balancer.reading,
        meter.received,
    )
    loop = ServeLoop(
        post=site.post,
        traffic=site.traffic,
        moe=moe,
        meter=meter,
        boundary=balancer.boundary,
        watch=lambda step: watch(step, meter.experts[step], balancer.observed()),
        name=variant.name,
    )
    desk = loop.run()
    balancer.close()
    return Pass(meter, desk, tuple(balancer.engine.reports), dict(balancer.engine.aborts))


def _open(site: Site, variant: Variant, weights: SlotWeights, shape: Shape) -> ExpertBalancer:
    """The variant's balancer over freshly filled slots."""
    layout = _layout(site, variant, shape)
    staging = LAYERS_IN_FLIGHT * shape.slots_per_rank if variant.balanced else 0
    family = weights.family()
    store = site.accelerator.slot_store(family.layout(staging))
    mine = site.post.rank * shape.slots_per_rank
    _fill(site, store, family, layout.placement[:, mine : mine + shape.slots_per_rank])
    config = engine_config(site, variant)
    if not variant.balanced:
        return open_static(site.accelerator, site.fabric, store, shape, layout, config)
    path = _path(site, store)
    return open_balancer(site.accelerator, site.fabric, store, shape, layout, config, path)


def _path(site: Site, store: SlotStore) -> CommitPath:
    """How weights come into slots."""
    if site.settings.commit is CommitMode.BOUNDARY:
        return AtBoundary()
    source = HostWeights(site.post.weights.to(HOST))
    backend = registry.accelerator(site.settings.backend)
    return UnderLock(Supply(source, StreamWriter(site.accelerator, store)), backend.capabilities)


def _layout(site: Site, variant: Variant, shape: Shape) -> Layout:
    """What is installed at the start of a variant."""
    if variant.name == PLACEMENT:
        assert site.layout is not None
        return site.layout
    placement = contiguous(shape)
    return Layout(placement, even_shares(placement, shape.experts))


def _fill(site: Site, store: SlotStore, family: Family, held: Placement) -> None:
    """Write experts into this rank's slots; `held` is the part of the placement that is here."""
    model = site.post.weights
    sources = [
        family.sources({"gate_up": model.gate_up[layer, expert], "down": model.down[layer, expert]})
        for layer, row in enumerate(held.tolist())
        for expert in row
    ]
    store.write(range(len(sources)), sources, site.post.compute)
    site.post.compute.synchronize(site.post.deadline)


def engine_config(site: Site, variant: Variant) -> EngineConfig:
    """The engine's cadence: two sub-windows a window where that is even."""
    settings = site.settings
    half = settings.window_size // 2
    halves = settings.window_size % 2 == 0 and settings.step_interval % half == 0
    return EngineConfig(
        label=variant.name,
        shares=ShareMode(variant.name) if variant.balanced else ShareMode.STATIC,
        window_size=settings.window_size,
        step_interval=settings.step_interval,
        sub_window=half if halves else 1,
        deadline=site.post.deadline,
    )
