"""Operators that read or write elements by their places."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from npusim.selftest.op_case import FLOATS, INTEGERS, Case, sample, short

PLACES = torch.tensor([2, 0, 3])
REDUCTIONS = ("sum", "prod", "amax", "amin", "mean")
MANY = torch.tensor([[2, 0, 3, 1], [1, 1, 0, 0], [0, 2, 2, 3], [3, 3, 3, 0]])


def cases() -> Iterator[Case]:
    """All of this file."""
    for dtype in (*INTEGERS, *FLOATS):
        name, x = short(dtype), sample(dtype, 4, 5)
        yield Case(f"reading {name}", _reading, (x, PLACES))
        yield Case(f"reading by int32 {name}", _reading_int32, (x, PLACES.int()))
        yield Case(f"gathering {name}", lambda a, i: (a.gather(1, i), a.take(i)), (x, MANY))
        yield Case(f"writing {name}", _writing, (x, PLACES))
        yield Case(f"writing rows {name}", _writing_rows, (x, PLACES))
        yield Case(f"adding {name}", _adding, (x, sample(dtype, 3, 5), torch.tensor([2, 0, 2])))
        yield Case(f"scattering {name}", _scattering, (x, MANY))
        yield Case(f"selecting {name}", _selecting, (x,))
    yield Case("selecting by truths", lambda x, m: (x[m], m[m]), (MANY, MANY > 1))
    yield Case("scattering anew", _scattering_anew, (torch.randn(4, 5), torch.randn(4, 5), MANY))
    yield Case("repeating", _repeating, (torch.arange(3) + 5, torch.tensor([1, 0, 5])))
    yield Case("repeating int32", _repeating_int32, (torch.arange(3), PLACES.int()))
    hot = torch.tensor([[0, 3], [1, 2]])
    yield Case("one_hot", lambda x: (F.one_hot(x, 5), F.one_hot(x), F.one_hot(x, 9)), (hot,))
    yield Case("embedding", lambda i, w: F.embedding(i, w), (hot, torch.randn(5, 3)))
    yield Case("no places", _no_places, (torch.randn(3, 4), PLACES[:0]))


def _reading(x: Tensor, i: Tensor) -> object:
    return (
        (x[i], x[:, i], x[i, i], x[i - 4], x[i[:, None], i]),
        (x.index_select(0, i), x.index_select(1, i), x[1, 2].item(), x.tolist(), int(x.max())),
    )


def _reading_int32(x: Tensor, i: Tensor) -> object:
    return x.index_select(0, i), x[i.long()]


def _writing(x: Tensor, i: Tensor) -> object:
    one, whole, both, number, row = (x.clone() for _ in range(5))
    one[i] = 7
    whole[:, i] = x[:, :3]
    both[i, i] = x[0, :3]
    number[0:2, 1] = 5
    row[0] = x[1]
    return one, whole, both, number, row


def _writing_rows(x: Tensor, i: Tensor) -> object:
    return (
        (x.clone().index_copy_(0, i, x[:3]), x.index_copy(1, i, x[:, :3])),
        (x.clone().index_fill_(1, i, 9), x.index_fill(0, i, 9)),
        (x.index_put((i,), x[:3]), x.clone().put_(i, x[0, :3])),
    )


def _adding(x: Tensor, rows: Tensor, i: Tensor) -> object:
    return x.index_add(0, i, rows), x.index_put((i,), rows, accumulate=True)


def _scattering(x: Tensor, i: Tensor) -> object:
    order = torch.argsort(torch.arange(4, 0, -1, device=x.device).expand(4, 4).contiguous(), 1)
    return x.scatter(1, order, x), x.scatter(0, i, 5), x.scatter_add(1, i, x)


def _scattering_anew(x: Tensor, y: Tensor, i: Tensor) -> object:
    order = i.argsort(dim=1, stable=True)
    return (
        (x.clone().scatter_(1, order, y), x.clone().scatter_(1, order, 3.0)),
        (x.scatter(1, i, y, reduce="add"), x.scatter(1, i, 2.0, reduce="multiply")),
        [x.scatter_reduce(1, i, y, how) for how in REDUCTIONS],
        [x.clone().scatter_reduce_(1, i, y, how) for how in REDUCTIONS],
        [x.clone().scatter_reduce_(1, i, y, how, include_self=False) for how in REDUCTIONS],
    )


def _selecting(x: Tensor) -> object:
    few = x > x[0, 0]
    return (
        (x.masked_select(few), x[few], few.nonzero(), few.nonzero(as_tuple=True)),
        x.masked_scatter(few, x.flip(0)),
    )


def _repeating(x: Tensor, repeats: Tensor) -> object:
    column = x.reshape(3, 1).expand(3, 2)
    return (
        (x.repeat_interleave(repeats), x.repeat_interleave(repeats, output_size=6)),
        (x.repeat_interleave(2), column.repeat_interleave(2, 1), torch.repeat_interleave(repeats)),
        (column.repeat_interleave(repeats, 0), column.repeat_interleave(repeats, 0, output_size=6)),
    )


def _repeating_int32(x: Tensor, repeats: Tensor) -> object:
    return x.repeat_interleave(repeats), torch.repeat_interleave(repeats)


def _no_places(x: Tensor, i: Tensor) -> object:
    assigned, copied = x.clone(), x.clone()
    assigned[i] = 5
    copied.index_copy_(0, i, x[:0])
    return x[i], x[:, i], x.index_select(0, i), x.gather(0, i[:, None]), assigned, copied
