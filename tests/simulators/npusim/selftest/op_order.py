"""Operators that make few elements of many, or put them in order."""

from collections.abc import Iterator

import torch
from torch import Tensor

from npusim.selftest.op_case import FLOATS, INTEGERS, Case, sample, short


def cases() -> Iterator[Case]:
    """All of this file."""
    for dtype in (*INTEGERS, *FLOATS):
        name, x = short(dtype), sample(dtype, 4, 5)
        yield Case(f"sums {name}", _sums, (x,))
        yield Case(f"extremes {name}", _extremes, (x,))
        yield Case(f"running {name}", _running, (x,))
        if dtype != torch.float64:  # torch_npu does not sort float64
            yield Case(f"sorted {name}", _sorted, (x,))
        sequence = sample(dtype, 9).sort()[0]
        yield Case(f"searches {name}", _searches, (sequence, sample(dtype, 4, 3)))
    for dtype in FLOATS:
        yield Case(f"means {short(dtype)}", _means, (sample(dtype, 8, 16),))
        yield Case(f"norms {short(dtype)}", _norms, (sample(dtype, 8, 16),))
    for dtype in INTEGERS:
        yield Case(f"bincount {short(dtype)}", _bincount, (sample(dtype, 20),))
    yield Case("truths", _truths, (sample(torch.bool, 4, 5),))
    yield Case("histograms", lambda x: torch.histc(x, 4, 0, 8), (torch.tensor([1.0, 2.0, 7.0]),))
    yield Case("unique", _unique, (torch.tensor([3, 1, 3, 2]),))
    yield Case("a long row", lambda x: (x.sum(), x.sum(0), x.cumsum(0)), (torch.randn(300, 200),))


def _sums(x: Tensor) -> object:
    return (
        (x.sum(), x.sum(0), x.sum(1, keepdim=True), x.sum((0, 1)), x.sum(dtype=torch.float32)),
        (x.prod(), x.prod(0), x.trace(), x.count_nonzero()),
        (x.any(), x.all(), x.any(0), x.all(1), x.any(1, keepdim=True)),
    )


def _extremes(x: Tensor) -> object:
    return (
        (x.max(), x.min(), *x.max(0), *x.min(1, keepdim=True), x.amax(0), x.amin((0, 1))),
        (x.argmax(), x.argmin(1), x.argmax(0, keepdim=True)),
    )


def _running(x: Tensor) -> object:
    sums = x.cumsum(0), x.cumsum(-1), x.cumsum(0, dtype=torch.float32), x.diff(), x.diff(dim=0)
    return sums, x.cumprod(-1), *x.cummax(0), *x.cummin(0)


def _sorted(x: Tensor) -> object:
    return (
        (*x.sort(stable=True), *x.sort(dim=0, descending=True, stable=True)),
        (x.argsort(dim=0, stable=True), *x.topk(3), *x.topk(2, 0, largest=False)),
    )


def _searches(sequence: Tensor, values: Tensor) -> object:
    return (
        torch.searchsorted(sequence, values),
        torch.searchsorted(sequence, values, right=True),
        torch.searchsorted(sequence, values, out_int32=True),
        torch.searchsorted(sequence, 3),
        torch.bucketize(values, sequence),
    )


def _means(x: Tensor) -> object:
    return (
        (x.mean(), x.mean(-1), x.mean(0, keepdim=True), x.mean((0, 1))),
        (x.pow(2).mean(-1, keepdim=True), x.logsumexp(-1)),
        (x.var(), x.std(), x.var(0), x.std(1, correction=0)),
    )


def _norms(x: Tensor) -> object:
    return torch.linalg.vector_norm(x), x.norm(), x.norm(dim=0), x.median(), *x.kthvalue(2)


def _bincount(x: Tensor) -> object:
    return torch.bincount(x), torch.bincount(x, minlength=99)


def _truths(x: Tensor) -> object:
    return x.sum(), x.any(0), x.all(), x.cumsum(0), x.max(), x.count_nonzero(), *x.sort(stable=True)


def _unique(x: Tensor) -> object:
    return torch.unique(x), *torch.unique(x, return_inverse=True, return_counts=True)
