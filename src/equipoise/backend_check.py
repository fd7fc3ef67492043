"""`check_backend`: the conformance suite as a function."""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from equipoise import install_command
from equipoise.connection import available
from equipoise.hal import registry
from equipoise.hal.capabilities import Unavailable
from equipoise.hal.errors import BackendUnavailable, UsageError

if TYPE_CHECKING:
    from equipoise.hal.conformance.result import SuiteResult


def check_backend(
    backend: str = "cpu",
    *,
    communicator: str | None = None,
    ranks: int = 2,
    families: Sequence[str] | None = None,
    profile: str = "ci",
    seed: int = 0,
    cases: int | None = None,
) -> "SuiteResult":
    """Does a backend keep the hardware contract? Plays the conformance suite, for minutes.

        result = equipoise.check_backend("my_package:BACKEND", families=["ordering"])
        broken = [finding.clause for finding in result.clauses() if finding.status == "violated"]

    `clauses()` of the result has an entry for each clause that was judged, in the order of the
    contract: `clause`, its identifier there, and `status`: `held`, `violated`, `unsupported` (the
    backend does not declare the capability), `reported` (measured, not judged) or `not judged`. The
    `findings` of an entry have the smallest program that breaks the clause. `exit_code` is 0 where
    none is violated.

    Args:
        backend: accelerator, by a name that `equipoise doctor` lists, or as PACKAGE:OBJECT.
        communicator: likewise; the one that goes with the backend where none is named.
        ranks: the most processes that the communicator is tested on; they are started here.
        families: groups of properties to play, such as `ordering` or `kernels`; all by default.
        profile: `ci` (minutes) or `deep` (hours).
        seed: what the draws start from: the same seed draws the same programs.
        cases: how many cases of each property; as the profile says where None.

    Raises:
        BackendUnavailable: a backend is unknown, or cannot run here.
        UsageError: hypothesis is not installed; there is no such family or profile; or mpiexec
            started this process.
    """
    if importlib.util.find_spec("hypothesis") is None:
        raise UsageError(f"the suite draws with hypothesis: {install_command('conformance')}")
    from equipoise.hal.conformance.clauses import FAMILIES
    from equipoise.hal.conformance.profile import Profile
    from equipoise.hal.conformance.runner import ConformanceRun

    device_backend = available(backend)
    links = communicator or device_backend.communicator
    if isinstance(probed := registry.communicator(links).probe(), Unavailable):
        raise BackendUnavailable(f"{links} cannot run here: {probed.reason}")
    wanted = tuple(FAMILIES if families is None else families)
    if unknown := sorted(set(wanted) - set(FAMILIES)):
        raise UsageError(f"families {unknown} are unknown; known: {', '.join(FAMILIES)}")
    if profile not in list(Profile):
        raise UsageError(f"profile {profile!r} is unknown; known: {', '.join(Profile)}")
    if registry.communicator(links).launcher_rendezvous() is not None:
        raise UsageError("check_backend starts ranks: under mpiexec use `equipoise conformance`")
    campaign = ConformanceRun(
        backend=backend,
        communicator=links,
        ranks=ranks,
        profile=Profile(profile),
        families=wanted,
        seed=seed,
        cases=cases,
    )
    result = campaign.run(_Unwatched())
    assert result is not None  # only ranks of a launch have none
    return result


class _Unwatched:
    """Watches nothing."""

    def begin(self, total: int) -> None:
        pass

    def next(self, run: object) -> None:
        pass

    def found(self, finding: object) -> None:
        pass
