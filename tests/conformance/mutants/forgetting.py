"""Mutants of family *control* that forget too little or too much."""

from collections.abc import Sequence

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import network_with

from equipoise.backends.virtual.control_plane import VirtualControlPlane
from equipoise.hal.conformance.properties.control import FORGETTING
from equipoise.hal.errors import ControlPlaneLost


class ForgetsNothing(VirtualControlPlane):
    """Keeps everything, so that a store grows without end."""

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        self._world.store.check_reachable()


class ForgetsItsOwn(VirtualControlPlane):
    """Deletes this rank's ballot, and nothing else."""

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        super().forget(question, (self.rank,))


class OutcomesStay(VirtualControlPlane):
    """Deletes ballots only: a new question gets the old decision."""

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        outcome = self._store.decisions.get(question)
        super().forget(question, ranks)
        if outcome is not None:
            self._store.decisions[question] = outcome


class ForgetsByBeginning(VirtualControlPlane):
    """Deletes every question whose name begins with this one's."""

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        for name in {name for name, _ in self._store.ballots if name.startswith(question)}:
            super().forget(name, ranks)


class ForgetsOnce(VirtualControlPlane):
    """Does not bear that another rank was faster."""

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        if question not in self._store.decisions:
            raise ControlPlaneLost(f"{question!r} is not there")
        super().forget(question, ranks)


MUTANTS = (
    Mutant(
        name="nothing-is-forgotten",
        clause="C9",
        broken="What was forgotten is still there.",
        property=FORGETTING.name,
        subject=network_with(control=ForgetsNothing),
    ),
    Mutant(
        name="each-rank-forgets-its-own",
        clause="C9",
        broken="Only the ballot of the rank that forgets is gone.",
        property=FORGETTING.name,
        subject=network_with(control=ForgetsItsOwn),
    ),
    Mutant(
        name="outcomes-are-not-forgotten",
        clause="C9",
        broken="Ballots are gone, and the decision stays.",
        property=FORGETTING.name,
        subject=network_with(control=OutcomesStay),
    ),
    Mutant(
        name="forgetting-takes-more-along",
        clause="C9",
        broken="Questions whose names begin alike are forgotten, too.",
        property=FORGETTING.name,
        subject=network_with(control=ForgetsByBeginning),
    ),
    Mutant(
        name="forgetting-twice-is-an-error",
        clause="C9",
        broken="What is gone cannot be forgotten again.",
        property=FORGETTING.name,
        subject=network_with(control=ForgetsOnce),
    ),
)
