"""The start-up check that a row's bits do not depend on how many rows share its batch.

`NotBatchInvariant` is an `EquipoiseError`. What is checked is exactly what the model computes
with: every dense product, an expert, attention's two batched products, the row-wise functions.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.demo.model.config import HOST, ModelConfig
from equipoise.demo.model.experts import expert_rows
from equipoise.demo.model.layers import rms_norm, route
from equipoise.demo.model.rows import group_rows, product
from equipoise.hal.errors import EquipoiseError

ROW_COUNTS = (8, 16, 24, 32, 40, 64, 72, 128, 136, 256, 264, 512, 520, 1024, 1200)
"""Padded row counts to compare: every small one, and both sides of the powers of two."""

MAX_ROWS = 1536
"""Rows of the reference; windows of the counts above are cut out of it."""


class NotBatchInvariant(EquipoiseError):
    """This processor computes a row otherwise when its batch has other rows."""


@dataclass(frozen=True)
class RowProbe:
    """A row-wise function: (n, `width`) float32 -> (n, anything), for any padded n."""

    name: str
    width: int
    function: Callable[[Tensor], Tensor]
    by_request: bool = False
    """Whether the model calls it on rows of one request only."""


def check_batch_invariance(config: ModelConfig, device: torch.device = HOST) -> None:
    """Compute every product of the model at many row counts and compare bits, in about 0.1 s.

    On the current stream of `device`. Raises NotBatchInvariant naming the product and the row
    count that differed, or the number of threads where torch has more than one (a product may then
    be cut anywhere).
    """
    threads = torch.get_num_threads()
    if threads != 1:
        raise NotBatchInvariant(
            f"torch computes on {threads} threads, which may cut a product anywhere: "
            "call torch.set_num_threads(1) first"
        )
    candidates = probes(config, device)
    try:
        check_probes(candidates, device)
    except NotBatchInvariant:
        if device.type == HOST.type:
            raise
        # A device may sum otherwise for other numbers of rows. Then it gets one number of them;
        # attention's shapes depend on one request alone, whatever its company is.
        group_rows(device)
        check_probes([probe for probe in candidates if not probe.by_request], device)


def check_probes(candidates: Iterable[RowProbe], device: torch.device = HOST) -> None:
    """Compare each probe on windows of rows with the same rows among `MAX_ROWS`."""
    generator = torch.Generator().manual_seed(0)
    for probe in candidates:
        x = torch.randn(MAX_ROWS, probe.width, generator=generator).to(device)
        reference = probe.function(x)
        for count in ROW_COUNTS:
            for first in (0, 3, MAX_ROWS - count):
                window = slice(first, first + count)
                if not torch.equal(probe.function(x[window].clone()), reference[window]):
                    raise NotBatchInvariant(
                        f"{probe.name} gives other bits at {count} rows than at {MAX_ROWS}: "
                        f"outputs on this {_processor(device)} would depend on the batch"
                    )


def _processor(device: torch.device) -> str:
    return "processor" if device.type == "cpu" else f"device ({device})"


def probes(config: ModelConfig, device: torch.device = HOST) -> tuple[RowProbe, ...]:
    """Everything the decoder computes row by row, on random weights of the model's shapes."""
    draw = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> Tensor:
        scale: float = shape[-2] ** -0.5
        return (torch.randn(*shape, generator=draw) * scale).to(device)

    hidden, width = config.hidden, config.expert_width
    qkv, out, head = weight(hidden, 3 * hidden), weight(hidden, hidden), weight(hidden, 256)
    router, gate_up, down = (
        weight(hidden, config.experts),
        weight(hidden, 2 * width),
        weight(width, hidden),
    )
    ones = torch.ones(hidden).to(device)
    return (
        RowProbe(f"norm of {hidden}", hidden, lambda x: rms_norm(x, ones, config.norm_epsilon)),
        RowProbe(f"attention product {tuple(qkv.shape)}", hidden, lambda x: product(x, qkv)),
        RowProbe(f"attention product {tuple(out.shape)}", hidden, lambda x: product(x, out)),
        RowProbe("router", hidden, lambda x: torch.cat(route(x, router, config.top_k), dim=-1)),
        RowProbe(f"expert of width {width}", hidden, lambda x: expert_rows(x, gate_up, down)),
        RowProbe(f"head product {tuple(head.shape)}", hidden, lambda x: product(x, head)),
        *_attention_probes(config, weight),
    )


def _attention_probes(
    config: ModelConfig, weight: Callable[..., Tensor]
) -> tuple[RowProbe, RowProbe]:
    heads, width, context = config.heads, config.head_width, config.context
    keys, values = weight(heads, width, context), weight(heads, context, width)

    def by_head(x: Tensor, right: Tensor) -> Tensor:
        rows = x.view(len(x), heads, -1).transpose(0, 1).contiguous()
        return torch.bmm(rows, right).transpose(0, 1).flatten(1)

    return (
        RowProbe(
            f"attention scores over {context}", heads * width, lambda x: by_head(x, keys), True
        ),
        RowProbe(
            f"attention read over {context}", heads * context, lambda x: by_head(x, values), True
        ),
    )
