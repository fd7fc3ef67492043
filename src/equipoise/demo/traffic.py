"""Traffic of the demo: prompts of changing kind, the same for every number of ranks."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from equipoise.hal.errors import UsageError
from equipoise.input_files import read_input

PROMPT_BYTES = 128
DEFAULT_PHASES = ("python", "chinese", "tables")
"""Kinds of text with the most different experts; `english`, which uses python's, is shipped too."""


class InvalidText(UsageError):
    """A text file cannot be served; says which and why in one line."""


@dataclass(frozen=True)
class TrafficPhase:
    """A kind of text; `text` is valid UTF-8 without NUL, at least one prompt long."""

    name: str
    text: bytes


@dataclass(frozen=True)
class PromptRequest:
    """One prompt to be continued; `id` counts over the whole run, `phase` indexes the phases."""

    id: int
    phase: int
    prompt: bytes


def load_phases(paths: Sequence[Path] = ()) -> tuple[TrafficPhase, ...]:
    """One phase per file, named after it; the shipped `DEFAULT_PHASES` where no path is given.

    Raises InvalidText for a file that is missing, a directory, unreadable, empty, shorter than one
    prompt, holds a NUL byte, or is not UTF-8.
    """
    if not paths:
        return tuple(shipped_phase(name) for name in DEFAULT_PHASES)
    return tuple(_checked(path.stem, str(path), _read(path)) for path in paths)


def shipped_phase(name: str) -> TrafficPhase:
    """The held-out sample of one kind: python, english, chinese or tables."""
    file = files("equipoise.demo").joinpath("text", f"{name}.txt")
    if not file.is_file():
        raise InvalidText(f"no text of kind {name!r} is shipped")
    return _checked(name, f"{name}.txt", file.read_bytes())


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise InvalidText(f"{path} is a directory, not a text file")
    try:
        return read_input(path)
    except FileNotFoundError:
        raise InvalidText(f"{path} does not exist") from None
    except OSError as error:
        raise InvalidText(f"{path} cannot be read: {error.strerror}") from None


def _checked(name: str, label: str, text: bytes) -> TrafficPhase:
    if not text:
        raise InvalidText(f"{label} is empty")
    if len(text) < PROMPT_BYTES:
        raise InvalidText(f"{label} has {len(text)} bytes; one prompt takes {PROMPT_BYTES}")
    if 0 in text:
        raise InvalidText(f"{label} has a NUL byte at offset {text.index(0)}; it is not text")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise InvalidText(f"{label} is not UTF-8 at byte offset {error.start}") from None
    return TrafficPhase(name, text)


@dataclass(frozen=True)
class Traffic:
    """Requests by step: a pure function of these fields, whatever the number of ranks.

    Request i of a step belongs to rank i % ranks. Phases take equal numbers of consecutive steps
    (to within one). Prompts are cut from the phase's text at distinct, shuffled multiples of
    `prompt`; when all are used up they are shuffled anew. Raises ValueError for fewer steps than
    phases, and for counts below one.
    """

    phases: tuple[TrafficPhase, ...]
    steps: int
    requests_per_step: int = 8
    prompt: int = PROMPT_BYTES
    new_tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.phases or self.steps < len(self.phases):
            raise ValueError(f"{self.steps} steps cannot hold {len(self.phases)} phases, each one")
        if min(self.requests_per_step, self.prompt, self.new_tokens) < 1:
            raise ValueError("requests_per_step, prompt and new_tokens must be at least 1")
        for phase in self.phases:
            if len(phase.text) < self.prompt:
                raise ValueError(f"the text of {phase.name} is shorter than one prompt")

    @property
    def switch_steps(self) -> tuple[int, ...]:
        """The first step of every phase but the first."""
        return tuple(self._first_step(phase) for phase in range(1, len(self.phases)))

    def phase_of(self, step: int) -> int:
        """Which phase a step belongs to; IndexError outside 0 to steps - 1."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} is outside 0 to {self.steps - 1}")
        return sum(step >= first for first in self.switch_steps)

    def tokens(self, step: int) -> int:
        """Tokens of a step's forward, over all ranks: prompts that arrive, one of each request that
        decodes."""
        decoding = min(step, self.new_tokens - 1)
        return self.requests_per_step * (self.prompt + decoding)

    def arrivals(self, step: int) -> tuple[PromptRequest, ...]:
        """The requests that arrive at a step, in order of their id."""
        phase = self.phase_of(step)
        first = (step - self._first_step(phase)) * self.requests_per_step
        return tuple(
            PromptRequest(step * self.requests_per_step + i, phase, self._prompt(phase, first + i))
            for i in range(self.requests_per_step)
        )

    def _first_step(self, phase: int) -> int:
        return -(-phase * self.steps // len(self.phases))

    def _prompt(self, phase: int, number: int) -> bytes:
        text = self.phases[phase].text
        lap, place = divmod(number, len(text) // self.prompt)
        offset = _shuffled(len(text) // self.prompt, f"{self.seed} {phase} {lap}")[place]
        return text[offset * self.prompt : (offset + 1) * self.prompt]


@lru_cache(maxsize=16)
def _shuffled(count: int, seed: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)


def requests_of_rank(
    requests: Iterable[PromptRequest], rank: int, ranks: int
) -> tuple[PromptRequest, ...]:
    """The requests of one step that a rank serves: every `ranks`-th, from `rank` on."""
    return tuple(request for i, request in enumerate(requests) if i % ranks == rank)
