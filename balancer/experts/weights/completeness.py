"""Checks that every tensor that an expert consists of is registered.

A tensor *looks like experts'* if its leading dimension is the number of slots per rank or of
logical experts, or if it is in a list of that many modules (`experts.0.w1`, `experts.1.w1`, ...).
Tensors are compared by their memory, never by name: a kernel may hold the same bytes under another
name. A false alarm is better than a miss: a pattern with a reason excuses a tensor that is reported
wrongly, but a forgotten tensor shows only as wrong outputs after the first rebalance.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from equipoise.balancer.experts.weights.memory_spans import MemorySpan, SpanIndex
from equipoise.hal.arguments import short_text
from equipoise.hal.errors import ModelIncomplete, RegistrationError


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the model.

    Attributes:
        name: dotted.
        tensor: with plain memory; if the model's tensor wraps others, one of the wrapped tensors.
        span: the memory of `tensor`.
    """

    name: str
    tensor: Tensor
    span: MemorySpan

    def __str__(self) -> str:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{self.name} {dtype} {list(self.tensor.shape)}"


def model_tensors(model: nn.Module | Iterable[tuple[str, Tensor]]) -> tuple[ModelTensor, ...]:
    """Parameters, buffers, and attributes that are tensors or lists, tuples, dicts of them.

    Kernels often read tensors that were derived after loading and are plain attributes of a
    module; they have to move like any parameter. Tensors kept elsewhere are not found: pass pairs
    of name and tensor then. Tensors without elements, and lazy ones, are omitted. Raises
    `RegistrationError` for anything else.
    """
    pairs = _of_module(model) if isinstance(model, nn.Module) else _check_pairs(model)
    plain = [inner for name, tensor in pairs for inner in _unwrap(name, tensor)]
    return tuple(
        ModelTensor(name, tensor, MemorySpan.of(tensor))
        for name, tensor in plain
        if not nn.parameter.is_lazy(tensor) and tensor.numel()
    )


def _check_pairs(model: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the pairs. Raises `RegistrationError` for what is none, such as `parameters()`."""
    expected = "model must be a module, or pairs of name and tensor"
    if not isinstance(model, Iterable):
        raise RegistrationError(f"{expected}, got {short_text(model)}")
    for pair in model:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)
        if not is_pair:
            got = short_text(pair) if isinstance(pair, str) else f"a {type(pair).__name__}"
            raise RegistrationError(f"{expected}, got {got} among them")
        if not isinstance(pair[1], Tensor):
            raise RegistrationError(f"{expected}, got {short_text(pair[1])} for {pair[0]!r}")
        yield pair[0], pair[1]


def _of_module(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        own = (module._parameters, module._buffers, vars(module))
        for key, value in (item for values in own for item in values.items()):
            if value is not None and key not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors(f"{name}.{key}" if name else key, value)


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or the tensors in one list, tuple or dict."""
    if isinstance(value, Tensor):
        yield name, value
        return
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, Mapping):
        items = value.items()
    for key, item in items:
        if isinstance(item, Tensor):
            yield f"{name}.{key}", item


def _unwrap(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor, or those that it wraps: a wrapper has no memory that can be compared."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
        return
    for part in flatten()[0]:
        yield from _unwrap(f"{name}.{part}", getattr(tensor, part))


@dataclass(frozen=True)
class ExpertCounts:
    """Leading dimensions by which tensors of experts are recognised."""

    slots_per_rank: int
    experts: int

    @property
    def counts(self) -> frozenset[int]:
        """The set of both numbers."""
        return frozenset({self.slots_per_rank, self.experts})


def check_complete(
    model: str,
    model_tensors: Sequence[ModelTensor],
    claims: SpanIndex,
    expected: ExpertCounts,
    ignore: Mapping[str, str],
) -> tuple[str, ...]:
    """Returns what was excused, and which patterns excused nothing; one line each.

    Raises:
        ModelIncomplete: a tensor looks like experts' and is not registered, or one is registered
            that the model does not hold.
        RegistrationError: a pattern has no reason.
    """
    if not isinstance(ignore, Mapping):
        raise RegistrationError(f"ignore must map patterns to reasons, got {short_text(ignore)}")
    for pattern, reason in ignore.items():
        if not isinstance(reason, str) or not reason.strip():
            raise RegistrationError(f"model {model!r}: ignoring {pattern!r} needs a reason")
    loose = _unregistered_tensors(model_tensors, claims, expected)
    missing = [tensor for tensor in loose if not _patterns(tensor, ignore)]
    strangers = _not_in_model(model_tensors, claims)
    idle = [p for p in ignore if not any(fnmatchcase(tensor.name, p) for tensor in loose)]
    if missing or strangers:
        text = _error_text(model, missing, strangers, idle, claims)
        names = tuple(tensor.name for tensor in missing)
        raise ModelIncomplete(text, names, strangers)
    notes = (f"{tensor} stays: {ignore[_patterns(tensor, ignore)[0]]}" for tensor in loose)
    return (*notes, *(f"ignored pattern {p!r} matches nothing that is left out" for p in idle))


def _unregistered_tensors(
    model_tensors: Sequence[ModelTensor], claims: SpanIndex, expected: ExpertCounts
) -> list[ModelTensor]:
    lists = _expert_lists(model_tensors, claims, expected)
    return [
        tensor
        for tensor in model_tensors
        if (
            _has_leading_count(tensor, expected)
            or any(outer in lists for outer, _ in _list_positions(tensor.name))
        )
        and claims.bytes_covered(tensor.span) < tensor.span.nbytes
    ]


def _has_leading_count(model_tensor: ModelTensor, expected: ExpertCounts) -> bool:
    return model_tensor.tensor.dim() > 0 and model_tensor.tensor.shape[0] in expected.counts


def _expert_lists(
    model_tensors: Sequence[ModelTensor], claims: SpanIndex, expected: ExpertCounts
) -> set[str]:
    """Names of lists with as many numbered members as there are experts.

    A list of layers may have as many members. It is recognised by a registered tensor that has all
    its slots in one member of the list.
    """
    members: dict[str, set[str]] = defaultdict(set)
    for tensor in model_tensors:
        for outer, number in _list_positions(tensor.name):
            members[outer].add(number)
    return {
        outer for outer, numbers in members.items() if len(numbers) in expected.counts
    } - _layer_lists(model_tensors, claims, expected)


def _layer_lists(
    model_tensors: Sequence[ModelTensor], claims: SpanIndex, expected: ExpertCounts
) -> set[str]:
    spread: dict[tuple[int, str, str], set[str]] = defaultdict(set)
    for model_tensor in model_tensors:
        owners = {
            (claim.tensor_name.layer, claim.tensor_name.name)
            for claim in claims.overlapping(model_tensor.span)
        }
        for outer, number in _list_positions(model_tensor.name):
            for layer, tensor in owners:
                spread[layer, tensor, outer].add(number)
    if expected.slots_per_rank == 1:
        return set()
    return {outer for (_, _, outer), numbers in spread.items() if len(numbers) == 1}


def _list_positions(name: str) -> list[tuple[str, str]]:
    """Every list on the path of a name, with the member's number: (`experts`, `3`)."""
    parts = name.split(".")
    return [(".".join(parts[:place]), part) for place, part in enumerate(parts) if part.isdecimal()]


def _not_in_model(model_tensors: Sequence[ModelTensor], claims: SpanIndex) -> tuple[str, ...]:
    """Registered tensors of which the model holds no byte: copies, which no kernel reads."""
    claims_in_model = {
        id(claim) for tensor in model_tensors for claim in claims.overlapping(tensor.span)
    }
    return tuple(
        dict.fromkeys(
            str(claim.tensor_name) for claim in claims if id(claim) not in claims_in_model
        )
    )


def _patterns(tensor: ModelTensor, ignore: Mapping[str, str]) -> list[str]:
    return [pattern for pattern in ignore if fnmatchcase(tensor.name, pattern)]


def _error_text(
    model: str,
    missing: Sequence[ModelTensor],
    strangers: Sequence[str],
    idle: Sequence[str],
    claims: SpanIndex,
) -> str:
    lines = [f"model {model!r}: its experts are not registered as it holds them"]
    for tensor in missing:
        part = claims.bytes_covered(tensor.span)
        some = f" ({part} of {tensor.span.nbytes} bytes are)" if part else ""
        lines.append(f"  {tensor} is not registered{some}")
    lines += [f"  {place} is registered, but the model does not hold it" for place in strangers]
    lines += [f"  ignored pattern {pattern!r} matches nothing that is left out" for pattern in idle]
    return "\n".join(lines)
