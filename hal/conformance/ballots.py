"""What properties do with the control plane, on every executor alike."""

from collections.abc import Sequence

from equipoise.hal.conformance.bench import Bench, Play, Until
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import BallotIncomplete, Unsupported


def plane(bench: Bench) -> ControlPlane:
    """The rank's control plane. Raises `Unsupported` where there is no fabric."""
    if bench.fabric is None:
        raise Unsupported("a device by itself has no control plane")
    return bench.fabric.control


def gather(bench: Bench, question: str, ranks: Sequence[int] | None = None) -> Play:
    """Wait for all ballots, and return them; to be used with `yield from`."""
    control = plane(bench)

    def complete() -> bool:
        try:
            control.collect(question, 0.0, ranks)
        except BallotIncomplete:
            return False
        return True

    yield Until(complete, f"ballots on {question!r}")
    return control.collect(question, bench.patience, ranks)


def meet(bench: Bench, point: str) -> Play:
    """Wait until every rank has come to this point; to be used with `yield from`."""
    plane(bench).cast(point, b"here")
    yield from gather(bench, point)
