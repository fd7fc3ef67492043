"""Operators that make, copy, cast or rearrange elements."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from npusim.selftest.op_case import FLOATS, INTEGERS, SMALL_FLOATS, Case, Program, sample, short

ALL = (torch.bool, *INTEGERS, *FLOATS)


def cases() -> Iterator[Case]:
    """All of this file."""
    for dtype in ALL:
        name, x = short(dtype), sample(dtype, 40, 5)
        yield Case(f"made {name}", _made, (x,))
        yield Case(f"filled {name}", _filled, (x,))
        yield Case(f"copied {name}", _copied, (x,))
        yield Case(f"joined {name}", _joined, (sample(dtype, 4, 5), sample(dtype, 4, 5)))
        yield Case(f"moved {name}", _moved, (sample(dtype, 4, 5),))
        for target in ALL[:-1]:  # torch_npu makes float32 of a cast to float64
            yield Case(f"{name} to {short(target)}", _cast(target), (sample(dtype, 6, 7),))
    for dtype in SMALL_FLOATS:
        yield Case(f"cast to {short(dtype)}", _small(dtype), (torch.randn(4, 5),))
    anchor = torch.zeros(1)
    yield Case("ranges", _ranges, (anchor,))
    yield Case("nothing", _nothing, (torch.zeros(0),))
    yield Case("no dimensions", _no_dimensions, (torch.tensor(1.5), torch.tensor(2.5)))
    yield Case("bytes", lambda x: (x.view(torch.uint8), x.view(torch.int32)), (torch.randn(3, 4),))


def _made(x: Tensor) -> object:
    like = torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 1)
    return like, x.new_zeros(3), x.new_full((2,), 1), x.new_ones(2, 2), torch.eye(3, 4).to(x)


def _filled(x: Tensor) -> object:
    part = x.clone()
    part[:, ::2].zero_()
    return x.clone().fill_(1), x.clone().zero_(), part, x.clone().fill_(x[0, 0])


def _copied(x: Tensor) -> object:
    return x.clone(), x.t().contiguous(), x[::2, 1:].clone(), x.t().reshape(-1), x.flip(0)[3:]


def _joined(x: Tensor, y: Tensor) -> object:
    pieces = *torch.split_with_sizes(x, [1, 3]), *x.chunk(2, 1), *x.unbind()
    return torch.cat([x, y]), torch.cat([x, y], 1), torch.stack([x, y], -1), pieces


def _moved(x: Tensor) -> object:
    return (
        (F.pad(x, (1, 2), value=1), F.pad(x, (0, -1)), x.flip(0), x.flip(0, 1), x.roll(1, 0)),
        (x.repeat(2, 3), x.expand(2, 4, 5).contiguous(), x.tril(), x.triu(1)),
        (x.clone().tril_(), x.clone().triu_(1), x.movedim(0, 1).contiguous(), x.diagonal().clone()),
        (
            x.unfold(0, 2, 1).contiguous(),
            x.as_strided((2, 2), (1, 2)).clone(),
            x.roll((1, 2), (0, 1)),
        ),
    )


def _cast(target: torch.dtype) -> Program:
    def program(x: Tensor) -> object:
        whole = torch.zeros(6, 7, dtype=target, device=x.device)
        part = whole.clone()
        part[:, :3].copy_(x[:, :3])
        return x.to(target), whole.copy_(x), part

    return program


def _small(dtype: torch.dtype) -> Program:
    def program(x: Tensor) -> object:
        small = x.to(dtype)
        parts = small.t().contiguous(), small[1:, ::2].clone(), torch.zeros_like(small).copy_(x)
        return small.float(), small.to(torch.bfloat16), [part.view(torch.uint8) for part in parts]

    return program


def _ranges(anchor: Tensor) -> object:
    on = anchor.device
    return (
        (torch.arange(7, device=on), torch.arange(3, 9, 2, device=on)),
        (torch.arange(5, 0, -1, device=on), torch.arange(0.0, 1.0, 0.25, device=on)),
        (torch.linspace(0, 1, 5, device=on), torch.eye(3, device=on)),
        torch.ops.aten.range.step(1, 4, device=on),
        (torch.tensor([1, 2], device=on), torch.tensor(3.0, device=on)),
    )


def _nothing(x: Tensor) -> object:
    places = x.long()
    return (
        (x.sum(), x + 1, x.clone(), x.cumsum(0), *x.sort(), x.nonzero(), torch.cat([x, x])),
        (x[places], x.gather(0, places), torch.bincount(places, minlength=3)),
        (torch.zeros(0, 3, device=x.device), torch.arange(0, device=x.device)),
    )


def _no_dimensions(x: Tensor, y: Tensor) -> object:
    return (
        (x + y, x * 2, -x, x < y, torch.where(x < y, x, y), x.long(), x.sum(), x.clamp(0, 1)),
        (x.reshape(1), x.expand(3).contiguous(), torch.stack([x, y]), x.item()),
    )
