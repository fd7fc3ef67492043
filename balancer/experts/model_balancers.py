"""All models of a rank, balanced: one engine a family of layers, one step counter a model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from equipoise.balancer.experts.endings import abandon, close_all
from equipoise.balancer.experts.ledger import Ledger
from equipoise.balancer.experts.model_balancer import ModelBalancer
from equipoise.hal.errors import UsageError


@dataclass(frozen=True, eq=False)
class ModelBalancers:
    """Balancers of several models, by name, in one order on every rank."""

    balancers: Mapping[str, ModelBalancer]

    def __iter__(self) -> Iterator[ModelBalancer]:
        return iter(self.balancers.values())

    def __getitem__(self, name: str) -> ModelBalancer:
        if name not in self.balancers:
            raise UsageError(f"no model is named {name!r}; there are: {', '.join(self.balancers)}")
        return self.balancers[name]

    @property
    def ledger(self) -> Ledger:
        """What all of them take of this rank's device."""
        return sum((balancer.ledger for balancer in self), Ledger())

    def close(self) -> None:
        """End all engines; bounded."""
        close_all(self)

    def reconfigure(
        self, active_ranks: Sequence[int], steps: Mapping[str, int]
    ) -> "ModelBalancers":
        """Go on without the ranks that are gone; collective among `active_ranks`.

        These balancers are closed, whatever comes of it.

        Args:
            active_ranks: numbers on the control plane of those that are left.
            steps: of each model, the next boundary to come.

        Raises:
            UsageError: other models than these; nothing has happened.
            EquipoiseError: as `ExpertBalancer.reconfigure` does, for the first model that cannot.
        """
        if set(steps) != set(self.balancers):
            raise UsageError(f"steps of {sorted(steps)}, not of {sorted(self.balancers)}")
        made: dict[str, ModelBalancer] = {}
        for name, balancer in self.balancers.items():
            try:
                made[name] = balancer.reconfigure(active_ranks, steps[name])
            except BaseException:
                abandon([*made.values(), *list(self)[len(made) + 1 :]])
                raise
        return ModelBalancers(made)
