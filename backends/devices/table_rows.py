"""New routing tables as one block of page-locked memory, so that they travel in one copy."""

import torch
from torch import Tensor

from equipoise.backends.devices.memory import pinned
from equipoise.hal.kernels import TableUpdate


def table_rows(update: TableUpdate) -> Tensor:
    """Layer numbers and tables side by side, int32 [layers, 1 + ...]; taken now."""
    layers = torch.tensor(update.layers, dtype=torch.int32)[:, None]
    parts = [layers, update.start, update.replicas, update.cumulative]
    width = sum(part.shape[1] for part in parts)
    block = pinned(len(update.layers) * width * torch.int32.itemsize).view(torch.int32)
    return torch.cat(parts, dim=1, out=block.view(-1, width))
