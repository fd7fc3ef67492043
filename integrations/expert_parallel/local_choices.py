"""Rows for libraries that send a token once to each rank, and add what ranks return.

The normal kernels of DeepEP, the high-throughput ones of NCCL-EP and FlashInfer's `moe_ep` leave
the weighted sum over a rank's own experts to the caller.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LocalChoices:
    """The choices of received tokens, as far as they fall on this rank.

    Attributes:
        experts: integers [t, top_k], the local expert of a choice; negative for one that fell on
            another rank, and for a token that is none.
        weights: float32 [t, top_k]; contents beside negative experts are undefined.
    """

    experts: Tensor
    weights: Tensor

    def rows(self, received: Tensor) -> Tensor:
        """A row for each choice, [t * top_k, hidden], of the received tokens [t, hidden].

        Unused choices get one, too: their number is then known without reading the device.
        """
        return received.repeat_interleave(self.experts.shape[1], 0)

    def sum(self, outputs: Tensor) -> Tensor:
        """Sum of the outputs [t * top_k, hidden] by weight, in float32; [t, hidden]."""
        by_choice = outputs.view(*self.experts.shape, outputs.shape[1]).float()
        used = (self.experts >= 0)[:, :, None]
        weighted = by_choice * self.weights[:, :, None]
        return torch.where(used, weighted, 0.0).sum(1).to(outputs.dtype)
