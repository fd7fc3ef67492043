"""Tries to catch one broken CUDA backend, in a process of its own: a broken lock may leave a stream
of the device waiting for ever, and the vendor waits for that at the end of a process.

    python -m npusim --schedule lazy -- python -m cudasim.trial word_not_taken

The exit code is 0 when the property that must reject it found a violation.
"""

import os
import sys
from collections.abc import Sequence

from devices.conformance.breakage import planted
from devices.conformance.trial import own_faults

from cudasim import BACKEND
from cudasim.breakages import BREAKAGES
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.executors.device import DeviceSubject
from equipoise.hal.conformance.search import PropertyViolated, SearchSettings, search

CASES = 200
"""Most cases; the first violation ends the search."""


def main(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    (name,) = arguments
    breakage = next(breakage for breakage in BREAKAGES if breakage.name == name)
    with own_faults(), planted(breakage):
        effort = SearchSettings(cases=CASES, seed=0, max_shrinks=0)
        verdict = search(suite.find(breakage.property), DeviceSubject(BACKEND), effort)
        print(verdict, flush=True)
        return 0 if isinstance(verdict, PropertyViolated) else 1


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
