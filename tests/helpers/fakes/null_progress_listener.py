"""A listener for runs of the conformance suite whose progress no test looks at."""

from equipoise.hal.conformance.result import Finding
from equipoise.hal.conformance.runner import PropertyRun


class NullProgressListener:
    """Does nothing."""

    def begin(self, total: int) -> None:
        pass

    def next(self, run: PropertyRun) -> None:
        pass

    def found(self, finding: Finding) -> None:
        pass
