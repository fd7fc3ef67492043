"""The balancer of one model on one rank: its families of layers, by one step counter."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from equipoise.balancer.experts.endings import abandon, close_all
from equipoise.balancer.experts.expert_model import ExpertModel
from equipoise.balancer.experts.family_balancer import FamilyBalancer, LayerRouter, lost_of
from equipoise.balancer.experts.layout import Layout
from equipoise.balancer.experts.ledger import Ledger, Rounds, model_ledger
from equipoise.hal.errors import ExpertsLost
from equipoise.hal.slots import Reader
from equipoise.hal.stream import Stream


@dataclass(frozen=True)
class ModelReader:
    """A stream that is attached to every family of a model.

    Attributes:
        readers: one for each family.
    """

    readers: tuple[Reader, ...]

    def detach(self) -> None:
        """See `Reader`."""
        for reader in self.readers:
            reader.detach()


@dataclass(frozen=True, eq=False)
class ModelBalancer:
    """What the serve loop of a model holds. Layers go by the model's own numbers.

    A *step* is what is launched between two boundaries; it enters every layer as often as was
    registered. Steps of one model are counted apart from those of another.
    """

    model: ExpertModel
    families: tuple[FamilyBalancer, ...]

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around what launches `step`, on every rank; raises as `ExpertEngine.boundary` does."""
        self.cross(step)
        try:
            yield
        finally:
            self.launched()

    def boundary(self, step: int) -> None:
        """The same where nothing says when the forward is launched: work beside begins at once."""
        self.cross(step)
        self.launched()

    def cross(self, step: int) -> None:
        """The boundary before `step` alone; work beside begins at `launched`.

        Families come in the same order on every rank, because what they issue on the calling
        thread has to be issued alike where communicators are not independent (P4).
        """
        for family in self.families:
            family.boundary(step)

    def launched(self) -> None:
        """The forward behind the last boundary is on its way."""
        for family in self.families:
            family.launched()

    def reading(self, layer: int, step: int) -> AbstractContextManager[None]:
        """Around everything that one entry of `layer` in `step` launches that reads its slots.

        Raises:
            RegistrationError: no such layer.
            EngineError: steps enter the layer more or less often than was registered.
        """
        family, row = self._seat(layer)
        return family.reading(row, step)

    def router(self, layer: int) -> LayerRouter:
        """For the step path. Raises `RegistrationError`: no such layer."""
        return LayerRouter(*self._seat(layer))

    @property
    def layout(self) -> Layout:
        """What is installed, by row of the model's placement."""
        rows = [row for family in self.families for row in family.berth.family.layers]
        order = np.argsort(rows)
        parts = [family.inner.installed.layout for family in self.families]
        return Layout(
            np.concatenate([part.placement for part in parts])[order],
            np.concatenate([part.shares for part in parts])[order],
        )

    @property
    def ledger(self) -> Ledger:
        """What it takes of this rank's device: slots, staging, blobs, tables, counters."""
        inner = self.families[0].inner
        staging = [family.berth.store.layout.staging for family in self.families]
        ranks, parcel = len(inner.means.members.ranks), inner.means.config.parcel
        rounds = Rounds.over(inner.parts.communicators[0].capabilities)
        return model_ledger(self.model, ranks, staging, parcel, rounds)

    def attach(self, stream: Stream) -> Reader:
        """A further stream reads slots or tables of this model; see `ExpertBalancer.attach`."""
        return ModelReader(tuple(family.inner.attach(stream) for family in self.families))

    def close(self) -> None:
        """See `ExpertBalancer.close`; all families, whatever becomes of one."""
        close_all(self.families)

    def reconfigure(self, active_ranks: Sequence[int], step: int) -> "ModelBalancer":
        """See `ExpertBalancer.reconfigure`. This balancer is closed, whatever comes of it.

        Raises:
            ExpertsLost: names everything that the model has lost, in all its families.
        """
        made: list[FamilyBalancer] = []
        gone: dict[int, tuple[int, ...]] = {}
        for place, family in enumerate(self.families):
            try:
                made.append(family.reconfigure(active_ranks, step))
            except ExpertsLost as lost:
                gone |= lost.gone
            except BaseException:
                abandon([*made, *self.families[place + 1 :]])
                raise
        if gone:
            abandon(made)
            raise lost_of(self.model.name, gone)
        return ModelBalancer(self.model, tuple(made))

    def _seat(self, layer: int) -> tuple[FamilyBalancer, int]:
        seat = self._seats.get(layer)
        if seat is None:
            seat = self._homes[self.model.layer(layer)]
            self._seats[layer] = seat
        return seat

    @cached_property
    def _seats(self) -> dict[int, tuple[FamilyBalancer, int]]:
        """By the model's own number, as far as was asked for."""
        return {}

    @cached_property
    def _homes(self) -> dict[int, tuple[FamilyBalancer, int]]:
        """By row of the model's placement."""
        return {
            layer: (family, row)
            for family in self.families
            for row, layer in enumerate(family.berth.family.layers)
        }
