"""One rank's expert balancer, put together: what a model's serve loop holds."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from equipoise.balancer.experts.config import EngineConfig, ShareMode
from equipoise.balancer.experts.engine import EpochReport, ExpertEngine, Path
from equipoise.balancer.experts.gates import Gates, Guard, NoGates, StepKind
from equipoise.balancer.experts.installed import Installed
from equipoise.balancer.experts.jobs import Hire, finish
from equipoise.balancer.experts.layout import Layout, imbalance
from equipoise.balancer.experts.load import LoadWindow
from equipoise.balancer.experts.mover import Mover
from equipoise.balancer.experts.placement import SHARE_ONE, Shape
from equipoise.balancer.experts.renewal import KeepShares, LaggedShares, ShareRenewal
from equipoise.balancer.experts.router import BatchRouter, Router, TableRouter
from equipoise.balancer.experts.staff import Staff, threads
from equipoise.balancer.experts.updates import Updates
from equipoise.balancer.experts.voyages import Voyages
from equipoise.balancer.experts.writers import Supply
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.capabilities import Capabilities
from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import Unsupported
from equipoise.hal.slots import SlotStore


class Engine(Protocol):
    """What happens at boundaries."""

    @property
    def reports(self) -> Sequence[EpochReport]:
        """How each epoch so far ended."""
        ...

    @property
    def aborts(self) -> Mapping[str, int]:
        """Aborted epochs by reason."""
        ...

    def boundary(self, step: int) -> None:
        """Between two steps."""
        ...

    def close(self) -> None:
        """End what runs in the background; bounded."""
        ...


class StillEngine:
    """Static mode: the start layout stays; loads are observed all the same."""

    def __init__(self, load: LoadWindow, config: EngineConfig) -> None:
        self._load = load
        self._deadline = config.deadline
        self.reports: tuple[EpochReport, ...] = ()
        self.aborts: dict[str, int] = {}

    def boundary(self, step: int) -> None:
        """Take and close sub-windows."""
        finish(self._load.advance(step), self._deadline)

    def close(self) -> None:
        """Wait for a sum under way."""
        finish(self._load.drain(), self._deadline)


@dataclass(frozen=True)
class ExpertBalancer:
    """Router for the step path, engine for the boundaries, and what is installed."""

    installed: Installed
    load: LoadWindow
    router: Router
    engine: Engine
    shape: Shape
    guard: Guard

    def boundary(self, step: int) -> None:
        """Call before every step, on every rank; raises as `ExpertEngine.boundary` does."""
        self.engine.boundary(step)

    def reading(self, layer: int, step: int) -> AbstractContextManager[None]:
        """Around everything that `step` launches that reads the slots of `layer`."""
        return self.guard.reading(layer, step)

    def step_kind(self, step: int) -> StepKind:
        """Which locks `step` carries, for engines that capture one graph a kind."""
        return self.guard.kind(step)

    def close(self) -> None:
        """End the engine; bounded."""
        self.engine.close()

    def observed(self) -> float:
        """Imbalance of the last summed sub-window under the installed layout; nan before one.

        Mean over layers of max / mean - 1 over ranks, with the shares that the router applies.
        """
        if not self.load.sums:
            return float("nan")
        load, layout = self.load.latest, self.installed.layout
        applied = Layout(layout.placement, self.router.shares(load, layout, self.shape))
        return float(imbalance(load, applied, self.shape).mean()) / SHARE_ONE


@dataclass(frozen=True)
class AtBoundary:
    """Weights come from peers, beside the forward, and are committed between two steps."""


@dataclass(frozen=True)
class UnderLock:
    """Weights come from the host's memory, and layers are rewritten in place, a few a step.

    Attributes:
        supply: the weights, and who writes them.
        capabilities: of the accelerator's backend, which has to have what this takes.
    """

    supply: Supply
    capabilities: Capabilities


CommitPath = AtBoundary | UnderLock


def open_balancer(
    accelerator: Accelerator,
    fabric: Fabric,
    store: SlotStore,
    shape: Shape,
    layout: Layout,
    config: EngineConfig,
    path: CommitPath = AtBoundary(),
    hire: Hire | None = None,
) -> ExpertBalancer:
    """Put a balancer together; collective: it opens one communicator a purpose.

    Args:
        accelerator: this rank's device.
        fabric: this rank's connection to the others.
        store: this rank's slots, holding `layout`.
        shape: how many of everything.
        layout: what is installed at the start.
        config: cadence, bounds and share mode.
        path: how weights come into slots.
        hire: makes who works beside the forward: threads by default.

    Raises:
        Unsupported: the accelerator lacks what the path needs.
    """
    installed = Installed(accelerator, store, shape, layout)
    gates = _gates(accelerator, installed, shape, config, path)
    load = _window(accelerator, fabric, shape, config)
    staff = Staff.hired(hire or threads(config))
    renewal = _renewal(installed, load, shape, config, staff)
    router = _router(accelerator, fabric, installed, load, config)
    match path, gates:
        case UnderLock(supply, _), Gates():
            carrier: Path = Updates(
                accelerator,
                installed,
                gates,
                supply,
                staff.mover,
                fabric.control.rank,
                shape,
                config,
            )
        case _:
            mover = Mover(accelerator, fabric.open(f"{config.label}.moves"), store)
            rank = fabric.control.rank
            carrier = Voyages(installed, mover, staff.mover, rank, shape, config)
    engine = ExpertEngine(installed, load, carrier, renewal, fabric.control, config, staff)
    return ExpertBalancer(installed, load, router, engine, shape, gates)


def _gates(
    accelerator: Accelerator,
    installed: Installed,
    shape: Shape,
    config: EngineConfig,
    path: CommitPath,
) -> Guard:
    """Locks by layer where layers are rewritten in place. Raises `Unsupported`."""
    if isinstance(path, AtBoundary):
        return NoGates()
    if not path.capabilities.stream_lock or not path.capabilities.copy_independent_of_launch:
        # TensorRT-LLM's first copy engine deadlocked so: a copy that waits for a launch that waits
        # for the copy.
        raise Unsupported(
            f"{accelerator.name} cannot rewrite layers under a lock: it takes stream_lock and "
            "copy_independent_of_launch"
        )
    return Gates(accelerator, shape.layers, installed.readers, config.deadline)


def open_static(
    accelerator: Accelerator,
    fabric: Fabric,
    store: SlotStore,
    shape: Shape,
    layout: Layout,
    config: EngineConfig,
) -> ExpertBalancer:
    """The same without epochs: `layout` stays, its shares too; collective."""
    installed = Installed(accelerator, store, shape, layout)
    load = _window(accelerator, fabric, shape, config)
    router = TableRouter(accelerator, installed.tables, fabric.control.rank, load.counters)
    return ExpertBalancer(installed, load, router, StillEngine(load, config), shape, NoGates())


def _window(
    accelerator: Accelerator, fabric: Fabric, shape: Shape, config: EngineConfig
) -> LoadWindow:
    loads = fabric.open(f"{config.label}.loads")
    return LoadWindow(accelerator, loads, shape, config.sub_window, config.window_size)


def _renewal(
    installed: Installed, load: LoadWindow, shape: Shape, config: EngineConfig, staff: Staff
) -> ShareRenewal:
    if config.shares is ShareMode.LAGGED:
        return LaggedShares(installed, load, shape, config.hysteresis, staff.solver)
    return KeepShares(installed, shape)


def _router(
    accelerator: Accelerator,
    fabric: Fabric,
    installed: Installed,
    load: LoadWindow,
    config: EngineConfig,
) -> Router:
    if config.shares is ShareMode.EXACT:
        routing = fabric.open(f"{config.label}.routing")
        return BatchRouter(accelerator, routing, installed.tables, load.counters)
    return TableRouter(accelerator, installed.tables, fabric.control.rank, load.counters)
