"""Plays a case on the virtual accelerator: hosts, streams and network, each choice from bytes."""

from collections.abc import Callable, Generator
from contextlib import closing

from exploration.engine.patches import Patches, patched
from exploration.exchange.case import Case
from exploration.exchange.rank_program import Ready, Script
from torch import Tensor

from equipoise.backends.virtual.backend import VirtualBackend
from equipoise.backends.virtual.profiles import PROFILES
from equipoise.backends.virtual.world import Stepper, VirtualWorld
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.stream import Role
from equipoise.pipeline.all_to_all import fixed_capacity, torch_kernels, transport
from equipoise.pipeline.all_to_all.formats import ExchangeFormat
from equipoise.pipeline.all_to_all.kernels import ExchangeKernels
from equipoise.pipeline.all_to_all.torch_kernels import AllocateBytes
from equipoise.pipeline.all_to_all.transport import AllToAllTransport

PACKAGE = "equipoise.pipeline.all_to_all"
MOST = 5_000
"""Micro-steps after which a world counts as one that hangs."""
Make = Callable[[ExchangeFormat, AllToAllTransport, AllocateBytes], ExchangeKernels]


class Host:
    """A rank's host as a lane."""

    def __init__(self, world: VirtualWorld, rank: int, job: Generator[Ready, None, None]) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.ended = False
        self._world = world
        self._job = job
        self._ready: Ready = lambda: True

    def ready(self) -> bool:
        return not self.ended and self._ready()

    def step(self) -> None:
        self._world.step_in(self.ranks[0], self.ranks[0])
        try:
            self._ready = next(self._job)
        except StopIteration:
            self.ended = True


def made_wire(
    case: Case, group: Communicator, accelerator: Accelerator, deadline: float
) -> AllToAllTransport:
    if case.active:
        return transport.ActiveRanksTransport(group, accelerator, deadline, case.active)
    return transport.AllRanksTransport(group, accelerator, deadline)


def _open(world: VirtualWorld, rank: int) -> Communicator:
    world.step_in(rank, rank)
    return world.fabric(rank).open("experts")


def script(world: VirtualWorld, case: Case, group: Communicator, make: Make) -> Script:
    rank = group.rank
    accelerator, form = world.accelerator(rank), case.form()
    world.step_in(rank, rank)

    def empty(nbytes: int) -> Tensor:
        return world.empty(rank, nbytes)

    kernels = make(form, made_wire(case, group, accelerator, 1.0), lambda n: empty(n).zero_())
    exchange = fixed_capacity.FixedCapacityExchange(form, kernels, accelerator)
    return Script(case, rank, exchange, accelerator, empty)


def reference(
    form: ExchangeFormat, all_to_all: AllToAllTransport, allocate: AllocateBytes
) -> ExchangeKernels:
    """Looked up when it is made, since a mutant may stand there."""
    return torch_kernels.TorchKernels(form, all_to_all, allocate)


def play(case: Case, patches: Patches | None = None, make: Make = reference) -> dict[str, str]:
    """What is wrong with what came of a case, by property; nothing for a healthy exchange."""
    backend = PROFILES.get(case.world, VirtualBackend())
    with closing(backend.world(case.size, b"")) as world, patched(patches or {}, PACKAGE):
        groups = [_open(world, rank) for rank in range(case.size)]  # also who takes no part
        scripts = [script(world, case, groups[rank], make) for rank in case.ranks]
        hosts = [Host(world, s.rank, s.play()) for s in scripts]
        wrong: dict[str, str] = {}
        try:
            _drive(world, hosts, case)
        except Exception as error:
            wrong["end"] = f"{type(error).__name__}: {error}"
        for each in scripts:
            for name, what in each.report.wrong.items():
                wrong.setdefault(name, f"rank {each.rank}: {what}")
        return wrong


def _drive(world: VirtualWorld, hosts: list[Host], case: Case) -> None:
    """Without a schedule all that can move does so before the hosts go on, in turn."""
    lagging = _late(world, case)
    for micro_step in range(MOST):
        lanes: list[Stepper] = [*hosts, *world.steppers, *world.network.moving]
        able = [lane for lane in lanes if lane.ready()]
        able = [lane for lane in able if lane not in lagging] or able
        if not able:
            break
        bytes_ = case.schedule or [len(able) - 1]
        lane = able[bytes_[micro_step % len(bytes_)] % len(able)]
        lane.step()
        if isinstance(lane, Host):
            hosts.insert(0, hosts.pop(hosts.index(lane)))
    assert all(host.ended for host in hosts), "nobody can move, or there is no end"


def _late(world: VirtualWorld, case: Case) -> list[Stepper]:
    roles = [Role(case.late)] if case.late else []
    return [world.device(rank).stream(role)._queue for rank in case.ranks for role in roles]
