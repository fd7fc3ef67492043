"""Operators that work element by element."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from npusim.selftest.op_case import FLOATS, INTEGERS, Case, Program, sample, short

ROUNDING = ("abs", "neg", "ceil", "floor", "frac")
LOGARITHMIC = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p")
ROOTS = ("sqrt", "rsqrt", "reciprocal", "erf", "erfc", "sigmoid", "relu", "logical_not")
CIRCULAR = ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh")
UNARY_IN_PLACE = (*ROUNDING, *LOGARITHMIC, *ROOTS, *CIRCULAR)
TESTING = ("isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit")
UNARY = (*UNARY_IN_PLACE, *TESTING, "sign", "round", "trunc", "square")
BINARY = ("add", "sub", "mul", "div", "remainder", "floor_divide", "fmod")
COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")
LOGICAL = ("maximum", "minimum", "logical_and", "logical_or", "logical_xor")


def cases() -> Iterator[Case]:
    """All of this file."""
    for dtype in FLOATS:
        yield from _of_floats(dtype)
    for dtype in (*INTEGERS, *FLOATS):
        yield from _of_numbers(dtype)
    for dtype in (torch.bool, *INTEGERS):
        yield from _of_bits(dtype)
    yield from _mixed()


def _of_floats(dtype: torch.dtype) -> Iterator[Case]:
    x = sample(dtype, 8, 16)
    for name in UNARY:
        yield Case(f"{name} {short(dtype)}", getattr(torch, name), (x,))
    for name in UNARY_IN_PLACE:
        yield Case(f"{name}_ {short(dtype)}", getattr(torch.Tensor, f"{name}_"), (x,))
    yield Case(f"activations {short(dtype)}", _activations, (x,))
    yield Case(f"activations in place {short(dtype)}", _activations_in_place, (x,))
    yield Case(f"powers {short(dtype)}", _powers, (x, x))
    yield Case(f"blends {short(dtype)}", _blends, (x, sample(dtype, 8, 16), sample(dtype, 16)))
    yield Case(f"numbers {short(dtype)}", _with_numbers, (x,))


def _activations(x: Tensor) -> object:
    return (
        F.silu(x),
        F.gelu(x, approximate="tanh"),
        F.softplus(x),
        F.leaky_relu(x),
        F.logsigmoid(x),
        F.hardswish(x),
        F.hardsigmoid(x),
        F.mish(x),
        F.glu(x),
        F.threshold(x, 0.1, 20),
    )


def _activations_in_place(x: Tensor) -> object:
    return (
        F.hardswish(x.clone(), inplace=True),
        F.hardsigmoid(x.clone(), inplace=True),
        F.mish(x.clone(), inplace=True),
    )


def _powers(x: Tensor, y: Tensor) -> object:
    return (
        x**2,
        x**0.5,
        x.pow(3),
        torch.pow(2.0, x),
        x.pow(y.round()),
        x.clone().pow_(2),
        x.clone().pow_(y.round()),
        torch.atan2(x, y),
    )


def _blends(x: Tensor, y: Tensor, row: Tensor) -> object:
    return (
        x.lerp(row, 0.5),
        x.lerp(y, row),
        x.clone().lerp_(y, 0.5),
        x.clone().lerp_(y, y),
        torch.addcmul(x, y, row, value=2),
        torch.addcdiv(x, y, row, value=2),
        x.clone().addcmul_(y, row, value=2),
        x.clone().addcdiv_(y, row, value=2),
    )


def _with_numbers(x: Tensor) -> object:
    return (
        (x * 0.5, x + 1e-3, x / 3, 1 / x, x - 0.25, x > 0.1, x == 0, 2 - x, -x),
        (x.clone().div_(3), x.clone().add_(0.5, alpha=2), x.clone().sub_(0.5), x.clone().mul_(2)),
        (torch.div(x, 0.3, rounding_mode="floor"), x.clone().div_(0.3, rounding_mode="trunc")),
        (torch.isclose(x, x + 1e-9), x // 0.3, x % 0.3),
    )


def _of_numbers(dtype: torch.dtype) -> Iterator[Case]:
    name = short(dtype)
    x, y, row, one = (sample(dtype, *shape) for shape in ((4, 5), (4, 5), (5,), ()))
    for operation in (*BINARY, *COMPARING, *LOGICAL):
        yield Case(f"{operation} {name}", _shapes_of(operation), (x, y, row, one))
    for operation in (*BINARY, *COMPARING):
        yield Case(f"{operation} {name} number", _number_of(operation), (x,))
    for operation in (*BINARY, *COMPARING, "logical_and", "logical_or"):
        if operation == "div" and not dtype.is_floating_point:
            continue
        yield Case(f"{operation}_ {name}", _in_place_of(operation), (x, y))
    yield Case(f"quotients {name}", _quotients, (x, y))
    yield Case(f"choices {name}", _choices, (x, y))
    yield Case(f"clamps {name}", _clamps, (x, y))
    yield Case(f"masks {name}", _masks, (x, y))
    yield Case(f"numbers first {name}", _numbers_first, (x, y))
    yield Case(f"equal {name}", lambda a, b: (torch.equal(a, b), torch.equal(a, a.clone())), (x, y))


def _shapes_of(operation: str) -> Program:
    function = getattr(torch, operation)
    return lambda x, y, row, one: [
        function(x, y),
        function(x, row),
        function(x, one),
        function(one, x),
    ]


def _number_of(operation: str) -> Program:
    function = getattr(torch, operation)
    return lambda x: function(x, 3)


def _in_place_of(operation: str) -> Program:
    function = getattr(torch.Tensor, f"{operation}_")
    if operation.startswith("logical"):
        return lambda x, y: function(x.clone(), y)
    return lambda x, y: [function(x.clone(), y), function(x.clone(), 2)]


def _quotients(x: Tensor, y: Tensor) -> object:
    return (
        torch.div(x, y, rounding_mode="floor"),
        torch.div(x, y, rounding_mode="trunc"),
        torch.div(x, 3, rounding_mode="trunc"),
        x.clone().div_(y, rounding_mode="floor"),
        x.clone().div_(3, rounding_mode="floor"),
    )


def _choices(x: Tensor, y: Tensor) -> object:
    more = x > y
    return torch.where(more, x, y), torch.where(more, x, 0), torch.where(more, 1, x)


def _clamps(x: Tensor, y: Tensor) -> object:
    low, high = torch.minimum(x, y), torch.maximum(x, y)
    return (
        (x.clamp(10, 20), x.clamp(min=10), x.clamp(max=20), x.clamp_min(9), x.clamp_max(9)),
        (y.clamp(min=x), y.clamp(max=x), y.clamp(low, high), y.clamp_min(x), y.clamp_max(x)),
        (x.clone().clamp_(10, 20), x.clone().clamp_min_(9), x.clone().clamp_max_(9)),
        (x.clone().clamp_min_(y), x.clone().clamp_max_(y)),
    )


def _masks(x: Tensor, y: Tensor) -> object:
    mask, one = x > y, y[0, 0].clone()
    return (
        x.masked_fill(mask, 3),
        x.clone().masked_fill_(mask, one),
        x.clone().masked_scatter_(mask, y),
    )


def _numbers_first(x: Tensor, y: Tensor) -> object:
    return (
        2 + x,
        2 - x,
        2 * x,
        2 / x,
        2 // x,
        2 % x,
        torch.rsub(x, y),
        torch.add(torch.tensor(3), x),
    )


def _of_bits(dtype: torch.dtype) -> Iterator[Case]:
    x, y = sample(dtype, 4, 5), sample(dtype, 4, 5)
    yield Case(f"bits {short(dtype)}", _bits, (x, y))
    yield Case(f"bits in place {short(dtype)}", _bits_in_place, (x, y))
    if dtype != torch.bool:
        yield Case(f"shifts {short(dtype)}", _shifts, (x, y))


def _bits(x: Tensor, y: Tensor) -> object:
    return x & y, x | y, x ^ y, ~x, x & x[0], x & 1, x | 1, x ^ 1


def _bits_in_place(x: Tensor, y: Tensor) -> object:
    one = True if x.dtype == torch.bool else 1
    return (
        (x.clone().bitwise_and_(y), x.clone().bitwise_or_(y), x.clone().bitwise_xor_(y)),
        (x.clone().bitwise_and_(one), x.clone().bitwise_or_(one), x.clone().bitwise_xor_(one)),
    )


def _shifts(x: Tensor, y: Tensor) -> object:
    few = y % 5
    return x << 2, x >> 1, x << few, x >> few, x.clone().__ilshift__(2), x.clone().__irshift__(1)


def _mixed() -> Iterator[Case]:
    large = torch.tensor([2**62, -(2**63), -5, 2**63 - 1, 12345678901234567])
    yield Case("int64 that overflows", _wrapping, (large,))
    halves, whole = torch.randn(3), torch.tensor([1, 2, 3], dtype=torch.int32)
    yield Case("two types", lambda x, y: (x + y, x * y, x > y, x / y, y / x), (halves, whole))
    one = torch.tensor(4)
    yield Case("a type and a scalar's", lambda x, y: (x + y, y * x, x - y, x // y), (whole, one))


def _wrapping(x: Tensor) -> object:
    return (
        (x * -7046029254386353131, x + 2**62, x - 2**62, x * x, x.sum()),
        (x << 32, x >> 32, (x >> 32) & 0xFFFFFFFF, x ^ (x >> 29), (x * 0x99F0736B) & 0xFFFFFFFF),
    )
