"""`c10d:NAME`: a fabric over any backend of `torch.distributed`."""

from collections.abc import Sequence
from functools import cached_property
from importlib import import_module

from torch import distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from equipoise.backends.c10d.communicator import C10dCommunicator
from equipoise.backends.c10d.trial import Trial, trial_of
from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.backends.common.tcp_store import StoreHost, connect_store
from equipoise.hal.capabilities import Available, CommunicatorCapabilities, Probe, Unavailable
from equipoise.hal.communicator import Communicator, Rendezvous
from equipoise.hal.errors import BackendUnavailable, Unsupported
from equipoise.hal.support.validation import check_members


class C10dFabric:
    """A rank's connection to all others: our control plane, and the library's groups."""

    def __init__(self, backend: str, rendezvous: Rendezvous, trial: Trial) -> None:
        self._backend = backend
        self._where = rendezvous
        self._trial = trial
        self._control = StoreControlPlane(rendezvous)
        # Another connection: a library may block in the store for its whole time-out.
        self._store = connect_store(rendezvous)
        self._open: dict[str, C10dCommunicator] = {}

    @property
    def control(self) -> StoreControlPlane:
        """The control plane, which is not the library's."""
        return self._control

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        """A process group of its own."""
        where = self._where
        members = tuple(range(where.size) if ranks is None else ranks)
        check_members(f"communicator {purpose!r}", where, members)
        if purpose in self._open:
            raise Unsupported(f"communicator {purpose!r} was opened before")
        store = PrefixStore(f"c10d/{purpose}/{'-'.join(map(str, members))}", self._store)
        self._open[purpose] = communicator = C10dCommunicator(
            self._backend,
            store,
            purpose,
            members,
            where.rank,
            where.deadline,
            self._trial.capabilities,
            self._trial.absent,
        )
        return communicator

    def close(self) -> None:
        """Destroy every group, then close the control plane."""
        try:
            for communicator in self._open.values():
                communicator.close()
        finally:
            self._open.clear()
            self._control.close()


class C10dBackend:
    """A backend of `torch.distributed`, as it is.

    Args:
        backend: the name that `init_process_group` knows.
    """

    def __init__(self, backend: str) -> None:
        self.name = f"c10d:{backend}"
        self._backend = backend

    @cached_property
    def _trial(self) -> Trial:
        return trial_of(self._backend)

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What the library was found to offer, on a group of one rank (`trial.py`).

        Raises `BackendUnavailable` when it makes no group.
        """
        return self._trial.capabilities

    def probe(self) -> Probe:
        """Whether it makes a group of one rank; names what it does not offer."""
        try:
            absent = self._trial.absent
        except BackendUnavailable as error:
            return Unavailable(str(error))
        lacks = ", ".join(sorted(absent)) or "nothing"
        return Available(f"torch.distributed with {self._backend}; does not offer {lacks}")

    def launcher_rendezvous(self) -> Rendezvous | None:
        """The suite starts the ranks."""
        return None

    def host(self) -> StoreHost:
        """A store on this machine."""
        return StoreHost()

    def connect(self, rendezvous: Rendezvous) -> C10dFabric:
        """Meet the other ranks."""
        return C10dFabric(self._backend, rendezvous, self._trial)


def c10d_backend(name: str) -> C10dBackend:
    """The backend `NAME` of `torch.distributed`, or `MODULE:NAME`, where importing registers it.

    Raises:
        BackendUnavailable: torch has no such backend, or the module does not import.
    """
    module, _, backend = name.rpartition(":")
    if not distributed.is_available():
        raise BackendUnavailable("this build of torch has no torch.distributed")
    if module:
        try:
            import_module(module)
        except Exception as error:
            raise BackendUnavailable(f"c10d:{name}: {module} does not import: {error}") from error
    known = distributed.Backend.backend_list
    if backend.lower() not in known:
        names = ", ".join(sorted(set(known) - {"undefined"}))
        raise BackendUnavailable(
            f"torch.distributed has no backend {backend!r}; it has: {names} "
            "(or MODULE:NAME, where importing MODULE registers NAME)"
        )
    return C10dBackend(backend.lower())
