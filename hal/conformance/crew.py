"""Rank processes: copied when first needed, used by every case, replaced when broken."""

import selectors
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from equipoise.hal.conformance.member import Member
from equipoise.hal.conformance.template import ANSWER, Template
from equipoise.hal.errors import Violation

Mourn = Callable[[int, str], None]
"""Told at once which rank has ended, and how."""


class Crew:
    """Processes by rank. Not for several threads.

    Args:
        command: what each runs: a module that calls `process.serve`, and its arguments.
        patience: seconds that importing the module may take.
    """

    def __init__(self, command: Sequence[str], patience: float = ANSWER) -> None:
        self._command = tuple(command)
        self._patience = patience
        self._template: Template | None = None
        self.members: dict[int, Member] = {}

    def start(self, ranks: Collection[int]) -> None:
        """Start those of these ranks that do not run. Raises `Violation` of E1."""
        for rank in ranks:
            if rank not in self.members:
                self.members[rank] = self.hire()

    def hire(self) -> Member:
        """One more process, which is no rank; whoever asks ends it. Raises `Violation` of E1."""
        if self._template is None or not self._template.runs():
            self._dismiss()
            self._template = Template(self._command, self._patience)
        return Member(self._template)

    def order(self, orders: Mapping[int, dict[str, Any]]) -> None:
        """Send each rank its line."""
        for rank, line in orders.items():
            self.members[rank].order(line)

    def gather(
        self, ranks: Collection[int], lost: Collection[int], watchdog: float, mourn: Mourn
    ) -> dict[int, dict[str, Any]]:
        """One answer of each of `ranks`; nobody waits for those in `lost`, whose end is due.

        Raises:
            Violation: of E1, when another rank ends; of C8, when one does not answer within
                `watchdog` seconds: it quotes the stacks. No process is left then.
        """
        expiry = time.monotonic() + watchdog
        answers: dict[int, dict[str, Any]] = {}
        waiting = set(ranks) - set(lost)
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(self.members[rank].pipe, selectors.EVENT_READ, rank)
            while waiting:
                ready = selector.select(max(0.0, expiry - time.monotonic()))
                if not ready:
                    raise self._stuck(waiting, watchdog, answers)
                for key, _ in ready:
                    try:
                        answer = self.members[key.data].hear()
                    except EOFError:
                        selector.unregister(key.fd)
                        self._lose(key.data, lost, mourn)
                        continue
                    if answer is not None:
                        answers[key.data] = answer
                        waiting.discard(key.data)
        return answers

    def end(self, ranks: Collection[int]) -> None:
        """End these; whoever needs as many ranks starts new ones."""
        for rank in ranks:
            self.members.pop(rank).end()

    def close(self) -> None:
        """End every process."""
        self._end_all()
        self._dismiss()

    def _end_all(self) -> None:
        self.end(list(self.members))

    def _dismiss(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None

    def _lose(self, rank: int, lost: Collection[int], mourn: Mourn) -> None:
        how = self.members[rank].death()
        mourn(rank, how)
        if rank not in lost:
            complaints = self.members[rank].complaints()
            self._end_all()
            raise Violation("E1", f"rank {rank} {how}\n{complaints}")

    def _stuck(
        self, waiting: Collection[int], watchdog: float, answers: Mapping[int, dict[str, Any]]
    ) -> Violation:
        """Who does not answer, and where it stands; also what went wrong for those who do."""
        for rank in waiting:
            self.members[rank].stack()
        quotes = [f"rank {r}:\n{self.members[r].complaints()}" for r in sorted(waiting)]
        faults = {rank: told["fault"] for rank, told in answers.items() if "fault" in told}
        quotes += [f"rank {rank} answered: {fault[-1]}" for rank, fault in sorted(faults.items())]
        self._end_all()
        return Violation("C8", f"no answer within {watchdog:g} s from\n" + "\n".join(quotes))
