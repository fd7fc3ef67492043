"""A family of a model's layers on this rank, and the store that holds its slots."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from equipoise.balancer.experts.expert_model import ExpertModel, Family, ranges
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import EquipoiseError
from equipoise.hal.slots import SlotStore


@dataclass(frozen=True, eq=False)
class Berth:
    """What a commit path is made for.

    Attributes:
        accelerator: this rank's device.
        model: whose family it is.
        number: of the family, among those of the model.
        store: its slots. Their numbers are row * slots_per_rank + local slot, where *row* counts
            the layers of this family alone.
    """

    accelerator: Accelerator
    model: ExpertModel
    number: int
    store: SlotStore

    @property
    def family(self) -> Family:
        """Layers with slots of one descriptor."""
        return self.model.families[self.number]

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's own number of the layer of each row."""
        return tuple(self.model.numbers[row] for row in self.family.layers)

    @property
    def entries(self) -> dict[int, int]:
        """By row: how often every step enters the layer."""
        return {row: self.model.entries[at] for row, at in enumerate(self.family.layers)}

    @property
    def name(self) -> str:
        """For errors: an engine counts the layers of its family from 0."""
        return name_of(self.model, self.number)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors that are raised inside say whose they are."""
        try:
            yield
        except EquipoiseError as error:
            raise self.mark(error)  # noqa: B904 - it is the same error

    def mark(self, error: EquipoiseError) -> EquipoiseError:
        """The same error, which says whose it is, once."""
        if not str(error).startswith(self.name):
            error.args = (f"{self.name}: {error}", *error.args[1:])
        return error


def name_of(model: ExpertModel, number: int) -> str:
    """Model and layers of a family."""
    own = ranges([model.numbers[row] for row in model.families[number].layers])
    return f"model {model.name!r}, layers {own} counted from 0"
