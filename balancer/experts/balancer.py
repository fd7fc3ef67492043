"""One rank's expert balancer, put together: what a model's serve loop holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from equipoise.balancer.experts.config import EngineConfig, ShareMode
from equipoise.balancer.experts.engine import EpochReport, ExpertEngine
from equipoise.balancer.experts.installed import Installed
from equipoise.balancer.experts.jobs import Hire, finish
from equipoise.balancer.experts.load import LoadWindow
from equipoise.balancer.experts.mover import Mover
from equipoise.balancer.experts.placement import SHARE_ONE, Shape
from equipoise.balancer.experts.planner import Layout, imbalance
from equipoise.balancer.experts.renewal import KeepShares, LaggedShares, ShareRenewal
from equipoise.balancer.experts.router import BatchRouter, Router, TableRouter
from equipoise.balancer.experts.staff import Staff, threads
from equipoise.balancer.experts.voyages import Voyages
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric
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

    def boundary(self, step: int) -> None:
        """Call before every step, on every rank; raises as `ExpertEngine.boundary` does."""
        self.engine.boundary(step)

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


def open_balancer(
    accelerator: Accelerator,
    fabric: Fabric,
    store: SlotStore,
    shape: Shape,
    layout: Layout,
    config: EngineConfig,
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
        hire: makes who works beside the forward: threads by default.
    """
    installed = Installed(accelerator, store, shape, layout)
    load = _window(accelerator, fabric, shape, config)
    mover = Mover(accelerator, fabric.open(f"{config.label}.moves"), store)
    staff = Staff.hired(hire or threads(config))
    renewal = _renewal(installed, load, shape, config, staff)
    router = _router(accelerator, fabric, installed, load, config)
    voyages = Voyages(installed, mover, staff.mover, fabric.control.rank, shape)
    engine = ExpertEngine(installed, load, voyages, renewal, fabric.control, shape, config, staff)
    return ExpertBalancer(installed, load, router, engine, shape)


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
    return ExpertBalancer(installed, load, router, StillEngine(load, config), shape)


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
