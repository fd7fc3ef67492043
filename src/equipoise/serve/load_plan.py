"""What a load client sends, and when."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from equipoise.balancer.requests.workload import Workload

WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by"),
    *("on", "not", "he", "this", "are", "or", "his", "from", "at", "which", "but", "have", "an"),
    *("had", "they", "you", "were", "their", "one", "all", "we", "can", "her", "has", "there"),
    *("been", "if", "more", "when", "will", "would", "who", "so", "no", "time", "what", "up"),
    *("out", "man", "day", "new", "now", "way", "may", "use", "see", "two", "how", "its", "our"),
)
"""Each of them, with the blank before it, is one token to most tokenizers."""


@dataclass(frozen=True)
class OpenLoop:
    """Requests are sent at the times of the workload, whatever becomes of those before."""


@dataclass(frozen=True)
class ClosedLoop:
    """So many are under way at any time: a further one is sent as soon as one ends."""

    concurrency: int


Pace = OpenLoop | ClosedLoop


@dataclass(frozen=True)
class Planned:
    """One request.

    Attributes:
        number: its place, from 0.
        at: seconds from the first; 0.0 in a closed loop.
        prompt: text of about so many tokens as were wanted.
        output: tokens that it asks for.
    """

    number: int
    at: float
    prompt: str
    output: int


@dataclass(frozen=True)
class LoadPlan:
    """All requests, which are made as they are needed.

    Attributes:
        workload: prompts and outputs [n]; arrivals [n] for an open loop.
        pace: when they are sent.
        seed: which words prompts are made of. No two prompts of a plan are alike, so that no server
            finds one in its cache.
    """

    workload: Workload
    pace: Pace
    seed: int

    def __iter__(self) -> Iterator[Planned]:
        load = self.workload
        times = load.arrivals if isinstance(self.pace, OpenLoop) else None
        for number in range(load.count):
            at = 0.0 if times is None else float(times[number])
            text = prompt_of(self.seed, number, int(load.prompts[number]))
            yield Planned(number, at, text, int(load.outputs[number]))


def prompt_of(seed: int, number: int, tokens: int) -> str:
    """Words drawn for request `number`: the same for the same arguments, anywhere."""
    return " ".join(Random(f"{seed} {number}").choices(WORDS, k=tokens))
