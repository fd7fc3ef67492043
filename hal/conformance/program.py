"""Programs: what a property plays, as data that can be drawn, shrunk, printed and broadcast."""

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Argument = int | str
"""Argument of a step: a number, or a name."""


@dataclass(frozen=True)
class Step:
    """One call that a thread makes.

    Attributes:
        op: name of the call; the property's `play` implements it.
        args: its arguments.
        rank: the rank that makes it; -1 means every rank.
        thread: the thread of that rank that makes it.
    """

    op: str
    args: tuple[Argument, ...] = ()
    rank: int = -1
    thread: int = 0

    def __str__(self) -> str:
        call = f"{self.op}({', '.join(map(str, self.args))})"
        where = "" if self.rank < 0 else f"rank {self.rank}: "
        return where + (f"host {self.thread}: " if self.thread else "") + call


@dataclass(frozen=True)
class Program:
    """Steps in the order of issue, the number of ranks, and settings of the whole program.

    Attributes:
        steps: the calls.
        size: how many ranks play it.
        settings: numbers or names that hold for the whole program, sorted by name.
    """

    steps: tuple[Step, ...]
    size: int = 1
    settings: tuple[tuple[str, Argument], ...] = ()

    def setting(self, name: str) -> Argument:
        """The setting of that name. Raises `KeyError`."""
        return dict(self.settings)[name]

    def int_setting(self, name: str) -> int:
        """The setting of that name, which is a number."""
        return int(self.setting(name))

    def steps_of(self, rank: int, thread: int = 0) -> tuple[Step, ...]:
        """The steps of one thread of one rank."""
        return tuple(s for s in self.steps if s.rank in (-1, rank) and s.thread == thread)

    def lines(self) -> list[str]:
        """As text: one line for the settings, one for each step."""
        settings = ", ".join(f"{name} = {value}" for name, value in self.settings)
        ranks = f"{self.size} ranks" if self.size > 1 else ""
        head = "; ".join(filter(None, (ranks, settings)))
        return ([head] if head else []) + [str(step) for step in self.steps]


@dataclass(frozen=True)
class Case:
    """A program, and the bytes that decide the interleaving on a controlled world."""

    program: Program
    schedule: bytes = b""


def make_program(
    steps: Iterable[Step], size: int = 1, settings: Mapping[str, Argument] | None = None
) -> Program:
    """A program with sorted settings."""
    return Program(tuple(steps), size, tuple(sorted((settings or {}).items())))


def case_to_json(case: Case) -> dict[str, Any]:
    """The case as JSON, for a rank in another process."""
    program = case.program
    return {
        "steps": [[s.op, list(s.args), s.rank, s.thread] for s in program.steps],
        "size": program.size,
        "settings": dict(program.settings),
        "schedule": base64.b64encode(case.schedule).decode(),
    }


def case_from_json(data: Mapping[str, Any]) -> Case:
    """Inverse of `case_to_json`. Raises `KeyError` or `ValueError` on anything else."""
    steps = [Step(op, tuple(args), rank, host) for op, args, rank, host in data["steps"]]
    program = make_program(steps, data["size"], data["settings"])
    return Case(program, base64.b64decode(data["schedule"]))
