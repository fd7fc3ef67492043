"""The balancer of one family of a model's layers."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch import Tensor

from equipoise.balancer.experts.balancer import ExpertBalancer
from equipoise.balancer.experts.berth import Berth
from equipoise.balancer.experts.gates import OPEN
from equipoise.hal.errors import EquipoiseError, ExpertsLost
from equipoise.hal.stream import Stream


@dataclass(frozen=True, eq=False)
class FamilyBalancer:
    """Says in every error whose it is."""

    berth: Berth
    inner: ExpertBalancer

    def boundary(self, step: int) -> None:
        """See `ExpertEngine.boundary`."""
        # Every step comes by: a context manager would cost more than the boundary.
        try:
            self.inner.engine.boundary(step)
        except EquipoiseError as error:
            raise self.berth.mark(error)  # noqa: B904 - it is the same error

    def launched(self) -> None:
        """See `ExpertEngine.launched`."""
        self.inner.engine.launched()

    def reading(self, row: int, step: int) -> AbstractContextManager[None]:
        """See `Gates.reading`."""
        try:
            gate = self.inner.reading(row, step)
        except EquipoiseError as error:
            raise self.berth.mark(error)  # noqa: B904 - it is the same error
        return gate if gate is OPEN else self._named(gate)

    def close(self) -> None:
        """See `ExpertBalancer.close`."""
        with self.berth.named():
            self.inner.close()

    def reconfigure(self, active_ranks: Sequence[int], step: int) -> "FamilyBalancer":
        """See `ExpertBalancer.reconfigure`; layers of `ExpertsLost` are the model's own numbers."""
        try:
            with self.berth.named():
                return FamilyBalancer(self.berth, self.inner.reconfigure(active_ranks, step))
        except ExpertsLost as lost:
            own = {self.berth.layers[row]: experts for row, experts in lost.gone.items()}
            raise lost_of(self.berth.model.name, own) from lost

    @contextmanager
    def _named(self, gate: AbstractContextManager[None]) -> Iterator[None]:
        with self.berth.named(), gate:
            yield


@dataclass(frozen=True)
class LayerRouter:
    """The router of one layer."""

    family: FamilyBalancer
    row: int

    def route(self, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """See `Router.route`: slot ids, int32 [n, top_k], for expert ids of the same shape."""
        return self.family.inner.router.route(self.row, step, ids, on)

    @property
    def generation(self) -> int:
        """Of the tables by which it routes: what a dispatch carries, so that peers can compare."""
        return self.family.inner.installed.generation(self.row)


def lost_of(model: str, gone: dict[int, tuple[int, ...]]) -> ExpertsLost:
    """Experts that a model has lost, by its own numbers of layers."""
    return ExpertsLost(gone, f"model {model!r}: ")
