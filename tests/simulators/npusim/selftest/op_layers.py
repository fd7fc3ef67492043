"""What models are made of: products, normalisation, random numbers."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from npusim.selftest.op_case import FLOATS, Case, sample, short


def cases() -> Iterator[Case]:
    """All of this file."""
    for dtype in FLOATS:
        name, x, y = short(dtype), sample(dtype, 8, 16), sample(dtype, 16, 8)
        yield Case(f"products {name}", _products, (x, y))
        yield Case(f"sums of products {name}", _sums, (x, y))
        batched = sample(dtype, 2, 4, 6), sample(dtype, 2, 6, 4)
        yield Case(f"batched products {name}", _batched, batched)
        yield Case(f"normalised {name}", _normalised, (x,))
        yield Case(f"attention by parts {name}", _attention, (sample(dtype, 2, 3, 6, 8),))
        yield Case(f"no numbers {name}", _no_numbers, (x,))
        if dtype != torch.float64:  # torch_npu gives the limits of float32
            yield Case(f"replaced {name}", lambda a: torch.nan_to_num(a / a.relu()), (x,))
    for dtype in (torch.float16, torch.float32):
        yield Case(f"the vendor's own {short(dtype)}", _vendor, (sample(dtype, 8, 16),))
    yield Case("a large product", lambda a: (a @ a.t(), a.softmax(-1)), (torch.randn(200, 300),))
    yield Case("random", _random, (torch.zeros(1),))


def _products(x: Tensor, y: Tensor) -> object:
    return (
        (x @ y, torch.mm(x, y), torch.matmul(x, y), x.t() @ x, torch.outer(x[0], x[1])),
        (x.mv(y[:, 0]), x[0] @ y[:, 0], torch.dot(x[0], y[:, 0])),
        (F.linear(x, x), F.linear(x, x, x[:, 0])),
    )


def _sums(x: Tensor, y: Tensor) -> object:
    square = x[:, :8]
    return (
        torch.addmm(square, x, y, beta=2, alpha=3),
        square.clone().addmm_(x, y),
        torch.addmv(x[:, 0], x, y[:, 0]),
    )


def _batched(x: Tensor, y: Tensor) -> object:
    return (
        (torch.bmm(x, y), x @ y[0], x[0] @ y, torch.baddbmm(x[:, :, :4], x, y)),
        (torch.einsum("bij,bjk->bik", x, y), torch.einsum("ij,jk", x[0], y[0])),
    )


def _normalised(x: Tensor) -> object:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (
        (x.softmax(-1), x.softmax(0), x.log_softmax(-1), x * scale * x[0]),
        (F.layer_norm(x, (16,)), F.layer_norm(x, (16,), x[0], x[1]), F.rms_norm(x, (16,), x[0])),
    )


def _attention(query: Tensor) -> object:
    length = query.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ query.transpose(-1, -2)) * 0.25
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ query


def _no_numbers(x: Tensor) -> object:
    odd = x / x.relu()
    return odd.isnan(), odd.isinf(), odd.isfinite(), x.masked_fill(x > 0, float("-inf")).softmax(-1)


def _vendor(x: Tensor) -> object:
    """Operators that torch_npu adds to torch, and what they are on the CPU."""
    left, right = x.chunk(2, -1)
    if x.device.type == "cpu":
        wide = x.float()
        root = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
        normal = (wide * root * wide[0]).to(x.dtype)
        return F.silu(left) * right, normal, root, F.gelu(x), x.to(torch.bfloat16)
    own = torch.ops.npu
    return (
        own.npu_swiglu(x, -1),
        *own.npu_rms_norm(x, x[0].clone(), 1e-6),
        own.npu_gelu(x, approximate="none"),
        own.npu_dtype_cast(x, torch.bfloat16),
    )


def _random(anchor: Tensor) -> object:
    """Not the numbers, which differ, but that they are what was asked for."""
    on = anchor.device
    torch.manual_seed(3)
    normal, flat = torch.randn(2000, device=on), torch.rand(2000, device=on)
    integers = torch.randint(3, 10, (2000,), device=on)
    wide = torch.empty(2000, device=on).uniform_(2, 4), torch.empty(2000, device=on).normal_(5, 2)
    flips = torch.empty(2000, device=on).bernoulli_(0.25), torch.bernoulli(flat)
    other = torch.normal(1.0, 2.0, (2000,), device=on)
    sampled = torch.multinomial(torch.ones(5, device=on), 5)
    torch.manual_seed(3)
    return (
        torch.equal(normal, torch.randn(2000, device=on)),
        _about(normal, 0, 1) and _about(wide[1], 5, 2) and _about(other, 1, 2),
        _about(flat, 0.5, 12**-0.5) and _about(wide[0], 3, 3**-0.5),
        _about(flips[0], 0.25, 0.4330127) and _about(flips[1], 0.5, 0.5),
        (
            int(integers.min()),
            int(integers.max()),
            *torch.randperm(50, device=on).sort()[0].tolist(),
        ),
        sampled.sort()[0].tolist(),
    )


def _about(x: Tensor, mean: float, deviation: float) -> bool:
    return abs(float(x.mean()) - mean) < 0.1 * deviation + 0.02 and (
        abs(float(x.std()) - deviation) < 0.1 * deviation
    )
