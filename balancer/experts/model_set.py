"""Several models on one rank: a target and its draft, say."""

from collections.abc import Iterator
from dataclasses import dataclass

from equipoise.balancer.experts.claims import Claim, Claims, Span
from equipoise.balancer.experts.expert_model import ExpertModel
from equipoise.balancer.experts.slot_tensors import Place
from equipoise.hal.errors import RegistrationError


@dataclass(frozen=True, eq=False)
class ModelSet:
    """Models that are balanced apart, each by its own loads and placements.

    Weights that two models share would be moved by two engines that know nothing of each other:
    register a draft that reuses the target's experts as repeats in the target's registry.

    Raises:
        RegistrationError: no model at all; two of one name, or that share memory.
    """

    models: tuple[ExpertModel, ...]

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if not names:
            raise RegistrationError("there is no model to balance")
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise RegistrationError(f"two models are named {twice[0]!r}")
        claims = Claims()
        for model in self.models:
            claims = claims.plus(_claims(model))

    def __iter__(self) -> Iterator[ExpertModel]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)

    def __getitem__(self, name: str) -> ExpertModel:
        for model in self.models:
            if model.name == name:
                return model
        known = ", ".join(model.name for model in self.models)
        raise RegistrationError(f"no model is named {name!r}; there are: {known}")

    @property
    def nbytes(self) -> int:
        """Bytes of all slots of all models on this rank."""
        return sum(model.nbytes for model in self.models)

    def describe(self) -> str:
        """What each model says of itself."""
        return "\n".join(model.describe() for model in self.models)


def _claims(model: ExpertModel) -> Iterator[Claim]:
    for family in model.families:
        for number, slot in enumerate(family.slots):
            place, local = divmod(number, model.slots_per_rank)
            layer = model.numbers[family.layers[place]]
            for segment in slot:
                yield Claim(Span.of_segment(segment), Place(model.name, layer, segment.name), local)
