"""Family *overlap*: what runs at the same time."""

from equipoise.hal.conformance import beside
from equipoise.hal.conformance.bench import Bench, Play
from equipoise.hal.conformance.needs import a_held_stream
from equipoise.hal.conformance.program import Program
from equipoise.hal.conformance.property import Property


def _play(bench: Bench, found: Program) -> Play:
    return beside.play(bench, found, "B8", bench.hold)


PROPERTIES = (
    Property(
        name="declared-streams-run-side-by-side",
        family="overlap",
        clauses=("B8",),
        claim="While some of the declared streams are held, the others finish.",
        programs=beside.programs,
        play=_play,
        needs=a_held_stream,
    ),
)
