"""Requests that are served through the stages: who is in which micro-batch, and how long it took.

A closed loop: so many clients, each of which sends its next request when it has the last token of
the one before. A client's requests stay in one of the micro-batches in flight: engines schedule so,
since a request's next token needs the one before. In one pass a request that has just come has all
its prompt computed, and every other one row; both bring it a token. Which request is in which pass
is a function of the numbers alone, so every stage works it out for itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from handover import Batch, scheduled
from pipeline_emulation import FLOOR, message_bytes

SEED = 7
Floats = npt.NDArray[np.float64]


@dataclass
class Request:
    """What becomes of a request.

    Attributes:
        tokens: that it asks for.
        behind: the pass that ends the client's request before; None: it is there from the start.
        passes: that each bring it a token.
    """

    tokens: int
    behind: int | None
    passes: list[int] = field(default_factory=list)

    @property
    def waiting(self) -> bool:
        """Whether its prompt has not been computed."""
        return not self.passes

    @property
    def complete(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.passes) == self.tokens


@dataclass(frozen=True)
class Serving:
    """A scenario. See `Work`.

    Attributes:
        hidden: elements of a row.
        prompt: rows of a prompt.
        decode: tokens of a request, in the mean; between half and one and a half times as many.
        concurrency: clients.
        requests: in all.
        ratio: seconds of a prompt's transfer over those of its compute.
    """

    hidden: int
    prompt: int
    decode: int
    concurrency: int
    requests: int
    ratio: float

    @property
    def name(self) -> str:
        """For tables."""
        return (
            f"{self.requests} requests of {self.prompt} + about {self.decode} tokens, "
            f"{self.concurrency} at a time, hidden {self.hidden}, {self.ratio:g}"
        )

    @property
    def gauged(self) -> int:
        """See `Work`."""
        return self.prompt

    def fields(self) -> dict[str, Any]:
        """See `Work`."""
        return {"kind": "serving", **asdict(self)}

    def batches(self, seconds: Mapping[int, float], in_flight: int) -> list[Batch]:
        """See `Work`; compute is in proportion to rows, but for the floor."""
        transfer = seconds[message_bytes(self.hidden, self.prompt)]
        row = transfer / self.ratio / self.prompt
        rows, _ = self.plan(in_flight)
        batches = [
            Batch(step, n, max(FLOOR, row * n), len(rows) - 1 - step) for step, n in enumerate(rows)
        ]
        return scheduled(batches, in_flight)

    def plan(self, in_flight: int) -> tuple[list[int], list[Request]]:
        """Rows of every pass, and the requests."""
        coming = self._lengths()
        clients = [
            [_next(coming, None) for _ in range(len(range(lane, self.concurrency, in_flight)))]
            for lane in range(in_flight)
        ]
        done: list[Request] = []
        rows: list[int] = []
        while any(request for lane in clients for request in lane):
            rows.append(self._pass(clients[len(rows) % in_flight], len(rows), coming, done))
        return rows, done

    def _pass(
        self, lane: list[Request | None], step: int, coming: Iterator[int], done: list[Request]
    ) -> int:
        """A token for everybody in a micro-batch; its rows, one where nobody is."""
        rows = 0
        for client, request in enumerate(lane):
            if request is None:
                continue
            rows += self.prompt if request.waiting else 1
            request.passes.append(step)
            if request.complete:
                done.append(request)
                lane[client] = _next(coming, step)
        return max(rows, 1)

    def _lengths(self) -> Iterator[int]:
        half = self.decode // 2
        lengths = np.random.default_rng(SEED).integers(
            self.decode - half, self.decode + half + 1, self.requests
        )
        return iter(lengths.tolist())


def _next(coming: Iterator[int], behind: int | None) -> Request | None:
    tokens = next(coming, None)
    return None if tokens is None else Request(tokens, behind)


@dataclass(frozen=True)
class Latencies:
    """Seconds, float64 arrays; docs/metrics.md has the formulas.

    Attributes:
        e2e: of each request.
        ttft: of each request.
        tpot: of each request of more than one token.
        itl: between any two tokens of a request.
    """

    e2e: Floats
    ttft: Floats
    tpot: Floats
    itl: Floats


def latencies(requests: Sequence[Request], start: float, sampled: Sequence[float]) -> Latencies:
    """What clients saw, from when each pass was sampled."""
    e2e, ttft, tpot, itl = [], [], [], []
    for request in requests:
        sent = start if request.behind is None else sampled[request.behind]
        seen = [sampled[step] for step in request.passes]
        e2e.append(seen[-1] - sent)
        ttft.append(seen[0] - sent)
        itl += list(np.diff(seen))
        if len(seen) > 1:
            tpot.append((seen[-1] - seen[0]) / (len(seen) - 1))
    return Latencies(*(np.array(found) for found in (e2e, ttft, tpot, itl)))
