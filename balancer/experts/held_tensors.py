"""All tensors that a model holds, by name."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from equipoise.balancer.experts.claims import Span


@dataclass(frozen=True)
class Held:
    """A tensor of the model.

    Attributes:
        name: dotted.
        tensor: with plain memory; of a tensor that wraps others, one of these.
        span: its memory.
    """

    name: str
    tensor: Tensor
    span: Span

    def __str__(self) -> str:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{self.name} {dtype} {list(self.tensor.shape)}"


def held_tensors(model: nn.Module | Iterable[tuple[str, Tensor]]) -> tuple[Held, ...]:
    """Parameters, buffers, and attributes that are tensors or lists, tuples, dicts of them.

    Kernels often read tensors that were derived after loading and hang on a module as plain
    attributes; they have to move like any parameter. What is kept elsewhere is not seen: give
    pairs of name and tensor then. Tensors without elements, and those not yet made, are left out.
    """
    pairs = _of_module(model) if isinstance(model, nn.Module) else model
    plain = [inner for name, tensor in pairs for inner in _unwrapped(name, tensor)]
    return tuple(
        Held(name, tensor, Span.of(tensor))
        for name, tensor in plain
        if not nn.parameter.is_lazy(tensor) and tensor.numel()
    )


def _of_module(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        own = (module._parameters, module._buffers, vars(module))
        for key, value in (item for values in own for item in values.items()):
            if value is not None and key not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors(f"{name}.{key}" if name else key, value)


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or those of one list, tuple or dict."""
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


def _unwrapped(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A wrapper has no memory of its own, or none that can be told: look into it."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
        return
    for part in flatten()[0]:
        yield from _unwrapped(f"{name}.{part}", getattr(tensor, part))
