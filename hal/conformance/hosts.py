"""Plays the hosts of one rank for real: each in a thread of its own."""

import dataclasses
import threading
from typing import Any

from equipoise.hal.conformance.bench import Bench, Play
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import Property
from equipoise.hal.errors import Violation

WATCHDOG = 60.0
"""Seconds that the hosts of a rank may take for one case."""


def play_hosts(claim: Property, case: Case, bench: Bench) -> list[Any]:
    """What each host returned. Raises what the first of them raised, or `Violation` of C8."""
    if claim.hosts == 1:
        return [run(claim.play(bench, case.program))]
    answers: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def serve(host: int) -> None:
        try:
            seat = dataclasses.replace(bench, host=host)
            answers[host] = run(claim.play(seat, case.program))
        except BaseException as error:
            errors[host] = error

    threads = [threading.Thread(target=serve, args=(h,), daemon=True) for h in range(claim.hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG)
    if errors:
        raise errors[min(errors)]
    if len(answers) < claim.hosts:
        raise Violation("C8", f"a host of {claim.name} did not end within {WATCHDOG:g} s")
    return [answers[host] for host in range(claim.hosts)]


def run(play: Play) -> Any:
    """Play to the end: where it yields, the call that follows blocks by itself."""
    try:
        while True:
            next(play)
    except StopIteration as end:
        return end.value
