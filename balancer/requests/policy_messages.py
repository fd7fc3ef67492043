"""Messages between front ends that share a policy and the process that has it.

Nothing here does I/O. A `Link` carries messages, which JSON can express, in order, and delivers
each in a turn of its own, so that neither end is called while it works.
"""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Protocol, TypeAlias

from equipoise.balancer.requests.policy import WorkerState
from equipoise.hal.errors import PolicyError

VERSION = 2
"""Of the messages; both ends are of one installation, unless it was changed while they ran."""
Message: TypeAlias = list[Any]


class Link(Protocol):
    """One direction of a connection.

    Messages arrive in the order in which they were sent, each in a turn of its own, never within
    `send`. A link that breaks, or whose peer does not read, loses the rest and says so at its end.
    """

    def send(self, message: Message) -> None:
        """Send a message; does nothing on a link that is closed."""
        ...

    def close(self) -> None:
        """Close it, after what was sent."""
        ...


class SharedPolicyLost(PolicyError):
    """The process that has the shared policy does not answer, or its policy has failed.

    Attributes:
        reason: why it is lost.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the policy that front ends share is lost: {reason}")
        self.reason = reason


class MalformedMessage(Exception):
    """A front end sent what no front end of this version sends, or what the policy refuses."""


MAX_TOKENS = 2**31 - 1
"""Of a request, as `RequestRouter` has it."""
MAX_NUMBER = 2**53
"""Of anything else: exact in JSON everywhere."""
MAX_NAME = 1024
"""Characters of the name of a worker."""
FieldCheck: TypeAlias = Callable[[Any, int], bool]
"""Whether a field can have this value, where there are so many workers."""


def _whole(least: int, most: int) -> FieldCheck:
    # `type`: to Python, `true` is a whole number.
    return lambda value, _: type(value) is int and least <= value <= most


def _whole_list(most: int) -> FieldCheck:
    """Without a call for each number: a step has all requests that run."""
    return lambda values, _: (
        type(values) is list
        and set(map(type, values)) <= {int}
        and (not values or (min(values) >= 0 and max(values) <= most))
    )


def _optional(check: FieldCheck) -> FieldCheck:
    return lambda value, workers: value is None or check(value, workers)


def _is_worker(value: Any, workers: int) -> bool:
    return type(value) is int and 0 <= value < workers


def _is_next_worker(value: Any, workers: int) -> bool:
    return _is_worker(value, workers + 1)


def _is_name(value: Any, _: int) -> bool:
    return type(value) is str and len(value) <= MAX_NAME


def _is_lockstep(value: Any, _: int) -> bool:
    return value is None or type(value) is bool


def _is_state(value: Any, _: int) -> bool:
    return type(value) is str and value in {state.value for state in WorkerState}


def _is_usage(value: Any, _: int) -> bool:
    return type(value) in (int, float) and 0 <= value < inf


def _is_hits(value: Any, workers: int) -> bool:
    """Workers and their tokens by turns."""
    return (
        _whole_list(MAX_TOKENS)(value, workers)
        and len(value) % 2 == 0
        and all(worker < workers for worker in value[::2])
    )


_NUMBER, _TOKENS = _whole(0, MAX_NUMBER), _whole(0, MAX_TOKENS)
FIELDS: Mapping[str, tuple[FieldCheck, ...]] = {
    "hello": (_NUMBER, _is_lockstep),
    "alive": (),
    "arrive": (
        _NUMBER, _whole(1, MAX_TOKENS), _optional(_is_worker), _optional(_is_hits),
        _optional(_TOKENS),
    ),
    "running": (_NUMBER, _whole(1, MAX_TOKENS), _optional(_is_worker), _is_worker, _TOKENS),
    "tokens": (_whole_list(MAX_NUMBER), _whole_list(MAX_TOKENS), _whole_list(MAX_NUMBER)),
    "abort": (_NUMBER,),
    "worker": (
        _is_next_worker, _is_name, _optional(_NUMBER), _optional(_NUMBER), _is_state,
    ),
    "state": (_is_worker, _is_state, _NUMBER),
    "capacity": (_is_worker, _optional(_NUMBER), _optional(_NUMBER)),
    "report": (_is_worker, _NUMBER, _NUMBER, _NUMBER, _is_usage),
}  # fmt: skip
"""Messages of a front end, and what their fields can be; workers have numbers of its own."""


def check_message(message: Message, workers: int) -> None:
    """Raises `MalformedMessage` for one that is not in `FIELDS`; the front end knows of as many
    workers."""
    match message:
        case [str() as name, *fields] if name in FIELDS and len(fields) == len(FIELDS[name]):
            for number, (check, value) in enumerate(zip(FIELDS[name], fields, strict=True), 1):
                if not check(value, workers):
                    raise MalformedMessage(f"field {number} of {name!r} cannot be {_short(value)}")
        case _:
            raise MalformedMessage(f"not a message: {_short(message)}")


def _short(value: object) -> str:
    return repr(value)[:80]
