"""Whether everything that an expert has is registered.

A tensor *looks like experts'* if its leading dimension is the number of slots of a rank or of
logical experts, or if it lies in a list of so many modules (`experts.0.w1`, `experts.1.w1`, ...).
Tensors are compared by their memory, never by name: a kernel may hold the same bytes under another.
Rather once too often: what is named wrongly is excused with a pattern and a reason, in sight of
everybody; what is forgotten shows only as wrong answers, after the first move.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from equipoise.balancer.experts.claims import Claims
from equipoise.balancer.experts.held_tensors import Held
from equipoise.hal.errors import ModelIncomplete, RegistrationError


@dataclass(frozen=True)
class Expected:
    """By what numbers tensors of experts are known."""

    slots_per_rank: int
    experts: int

    @property
    def counts(self) -> frozenset[int]:
        """Either of them."""
        return frozenset({self.slots_per_rank, self.experts})


def check_complete(
    model: str,
    held: Sequence[Held],
    claims: Claims,
    expected: Expected,
    ignore: Mapping[str, str],
) -> tuple[str, ...]:
    """What was excused, and which patterns excused nothing; one line each.

    Raises:
        ModelIncomplete: a tensor looks like experts' and is not registered, or one is registered
            that the model does not hold.
        RegistrationError: a pattern has no reason.
    """
    for pattern, reason in ignore.items():
        if not reason.strip():
            raise RegistrationError(f"model {model!r}: ignoring {pattern!r} needs a reason")
    loose = _unregistered(held, claims, expected)
    missing = [one for one in loose if not _patterns(one, ignore)]
    strangers = _strangers(held, claims)
    idle = [p for p in ignore if not any(fnmatchcase(one.name, p) for one in loose)]
    if missing or strangers:
        text = _complaint(model, missing, strangers, idle, claims)
        names = tuple(one.name for one in missing)
        raise ModelIncomplete(text, names, strangers)
    excused = (f"{one} stays: {ignore[_patterns(one, ignore)[0]]}" for one in loose)
    return (*excused, *(f"ignored pattern {p!r} matches nothing that is left out" for p in idle))


def _unregistered(held: Sequence[Held], claims: Claims, expected: Expected) -> list[Held]:
    lists = _expert_lists(held, claims, expected)
    return [
        one
        for one in held
        if (_leads(one, expected) or any(outer in lists for outer, _ in _numbered(one.name)))
        and claims.covered(one.span) < one.span.nbytes
    ]


def _leads(one: Held, expected: Expected) -> bool:
    return one.tensor.dim() > 0 and one.tensor.shape[0] in expected.counts


def _expert_lists(held: Sequence[Held], claims: Claims, expected: Expected) -> set[str]:
    """Names of lists with as many numbered members as there are experts.

    A list of layers may have as many. It is known by a registered tensor that lies, with all its
    slots, in one member of the list.
    """
    members: dict[str, set[str]] = defaultdict(set)
    for one in held:
        for outer, number in _numbered(one.name):
            members[outer].add(number)
    return {
        outer for outer, numbers in members.items() if len(numbers) in expected.counts
    } - _layer_lists(held, claims, expected)


def _layer_lists(held: Sequence[Held], claims: Claims, expected: Expected) -> set[str]:
    spread: dict[tuple[int, str, str], set[str]] = defaultdict(set)
    for one in held:
        owners = {(claim.place.layer, claim.place.tensor) for claim in claims.touching(one.span)}
        for outer, number in _numbered(one.name):
            for layer, tensor in owners:
                spread[layer, tensor, outer].add(number)
    if expected.slots_per_rank == 1:
        return set()
    return {outer for (_, _, outer), numbers in spread.items() if len(numbers) == 1}


def _numbered(name: str) -> list[tuple[str, str]]:
    """Every list that a name goes through, and the number of the member: (`experts`, `3`)."""
    parts = name.split(".")
    return [(".".join(parts[:place]), part) for place, part in enumerate(parts) if part.isdecimal()]


def _strangers(held: Sequence[Held], claims: Claims) -> tuple[str, ...]:
    """Registered tensors of which the model holds no byte: copies, which nobody reads."""
    found = {id(claim) for one in held for claim in claims.touching(one.span)}
    return tuple(dict.fromkeys(str(claim.place) for claim in claims if id(claim) not in found))


def _patterns(one: Held, ignore: Mapping[str, str]) -> list[str]:
    return [pattern for pattern in ignore if fnmatchcase(one.name, pattern)]


def _complaint(
    model: str,
    missing: Sequence[Held],
    strangers: Sequence[str],
    idle: Sequence[str],
    claims: Claims,
) -> str:
    lines = [f"model {model!r}: its experts are not registered as it holds them"]
    for one in missing:
        part = claims.covered(one.span)
        some = f" ({part} of {one.span.nbytes} bytes are)" if part else ""
        lines.append(f"  {one} is not registered{some}")
    lines += [f"  {place} is registered, but the model does not hold it" for place in strangers]
    lines += [f"  ignored pattern {pattern!r} matches nothing that is left out" for pattern in idle]
    return "\n".join(lines)
