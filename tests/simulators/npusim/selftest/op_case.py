"""A comparison of torch on the device with torch on the CPU, bit by bit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

DEVICE = torch.device("npu:0")
Result = object
"""A tensor, a number, or tuples and lists of them."""
Program = Callable[..., Result]
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SMALL_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Case:
    """What `program` makes of copies of `tensors` is the same on both devices."""

    name: str
    program: Program
    tensors: tuple[Tensor, ...]

    def differences(self) -> tuple[int, list[str]]:
        """How many results were compared, and which are not equal."""
        try:
            expected = list(_leaves(self.program(*(t.clone() for t in self.tensors))))
            actual = list(_leaves(self.program(*(t.to(DEVICE) for t in self.tensors))))
        except (RuntimeError, NotImplementedError, TypeError) as error:
            return 0, [f"{self.name}: {' | '.join(str(error).splitlines()[:2])}"]
        if len(expected) != len(actual):
            return 0, [f"{self.name}: {len(actual)} results, expected {len(expected)}"]
        pairs = enumerate(zip(expected, actual, strict=True))
        return len(expected), [
            f"{self.name}, result {k}: {_shown(here)} became {_shown(there)}"
            for k, (here, there) in pairs
            if not _equal(here, there)
        ]


def sample(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random content: booleans, 1 to 59, or standard normal; on the CPU."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(1, 60, shape).to(dtype)


def short(dtype: torch.dtype) -> str:
    """The type without its module."""
    return str(dtype).removeprefix("torch.")


def _leaves(result: Result) -> Iterator[Result]:
    if isinstance(result, tuple | list):
        for part in result:
            yield from _leaves(part)
    else:
        yield result


def _equal(expected: Result, actual: Result) -> bool:
    if not isinstance(expected, Tensor):
        return expected == actual
    if not isinstance(actual, Tensor) or actual.device != DEVICE:
        return False
    on_host = actual.cpu()
    if (expected.dtype, expected.shape) != (on_host.dtype, on_host.shape):
        return False
    if expected.dtype.is_floating_point and expected.element_size() > 1:
        unknown = expected.isnan()
        if not torch.equal(unknown, on_host.isnan()):
            return False
        expected, on_host = expected.masked_fill(unknown, 0), on_host.masked_fill(unknown, 0)
    return torch.equal(_raw(expected), _raw(on_host))


def _raw(tensor: Tensor) -> Tensor:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return flat.copy_(tensor.reshape(-1)).view(torch.uint8)


def _shown(result: Result) -> str:
    if not isinstance(result, Tensor):
        return repr(result)
    shape = f"{short(result.dtype)} {tuple(result.shape)}"
    return f"{shape} {result.tolist()}" if result.numel() < 9 else shape
