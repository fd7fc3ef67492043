"""A fabric over a communication library that is judged as it is: only the control plane is ours."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.backends.common.library_trial import TIMEOUT, UNTRIED, Trial, trial_of
from equipoise.backends.common.tcp_store import StoreHost, connect_store
from equipoise.hal.capabilities import Available, CommunicatorCapabilities, Probe, Unavailable
from equipoise.hal.communicator import Communicator, Rendezvous
from equipoise.hal.errors import BackendUnavailable, CommunicatorFailed, Unsupported
from equipoise.hal.support.validation import check_members

ALONE = Rendezvous(rank=0, size=1, host="", port=0, deadline=TIMEOUT)
"""The rank of a trial."""


class OpenGroup(Protocol):
    """Makes a communicator of the library."""

    def __call__(
        self,
        store: Store,
        purpose: str,
        ranks: Sequence[int],
        where: Rendezvous,
        capabilities: CommunicatorCapabilities,
    ) -> Communicator:
        """A communicator among `ranks` that meets in `store`, which is its own.

        Raises `CommunicatorFailed` when the library makes no group.
        """
        ...


class LibraryFabric:
    """A rank's connection to all others: our control plane, and the library's groups."""

    def __init__(
        self, open_group: OpenGroup, rendezvous: Rendezvous, capabilities: CommunicatorCapabilities
    ) -> None:
        self._open_group = open_group
        self._where = rendezvous
        self._capabilities = capabilities
        self._control = StoreControlPlane(rendezvous)
        # Another connection: a library may block in the store for its whole time-out.
        self._store = connect_store(rendezvous)
        self._open: dict[str, Communicator] = {}

    @property
    def control(self) -> StoreControlPlane:
        """The control plane, which is not the library's."""
        return self._control

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        """A group of the library, for this purpose alone."""
        where = self._where
        members = tuple(range(where.size) if ranks is None else ranks)
        check_members(f"communicator {purpose!r}", where, members)
        if purpose in self._open:
            raise Unsupported(f"communicator {purpose!r} was opened before")
        store = PrefixStore(f"library/{purpose}/{'-'.join(map(str, members))}", self._store)
        communicator = self._open_group(store, purpose, members, where, self._capabilities)
        self._open[purpose] = communicator
        return communicator

    def close(self) -> None:
        """Close every communicator, then the control plane."""
        try:
            for communicator in self._open.values():
                communicator.close()
        finally:
            self._open.clear()
            self._control.close()


class LibraryBackend:
    """A library's groups as communicators. It declares what a trial on one rank has shown.

    Args:
        name: the name that users select it by.
        device: type of the device that it is tried on.
        open_group: makes a communicator.
    """

    def __init__(self, name: str, device: str, open_group: OpenGroup) -> None:
        self.name = name
        self._device = device
        self._open_group = open_group

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What it was found to offer. Raises `BackendUnavailable` when it makes no group."""
        return self._trial.capabilities

    def probe(self) -> Probe:
        """Whether it makes a group of one rank; names what it does not offer."""
        try:
            absent = self._trial.absent
        except BackendUnavailable as error:
            return Unavailable(str(error))
        lacking = "; ".join(f"{op} ({why})" for op, why in sorted(absent.items()))
        return Available(f"{self.name}, which does not offer {lacking}")

    def launcher_rendezvous(self) -> Rendezvous | None:
        """The suite starts the ranks."""
        return None

    def host(self) -> StoreHost:
        """A store on this machine."""
        return StoreHost()

    def connect(self, rendezvous: Rendezvous) -> LibraryFabric:
        """Meet the other ranks."""
        return LibraryFabric(self._open_group, rendezvous, self.capabilities)

    @cached_property
    def _trial(self) -> Trial:
        try:
            return trial_of(self.name, self._device, self._open_alone)
        except CommunicatorFailed as error:
            raise BackendUnavailable(f"{self.name}: {error}") from error

    def _open_alone(self, number: int) -> Communicator:
        untried = replace(UNTRIED, stream_ordered=self._device != "cpu")
        return self._open_group(HashStore(), f"trial {number}", (0,), ALONE, untried)
