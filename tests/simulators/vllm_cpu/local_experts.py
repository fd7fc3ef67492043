"""Which of the chosen experts are here."""

import torch


def only_local(
    expert_map: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of this rank's weights, and what each counts.

    Args:
        expert_map: (global experts,), the local row of each, or -1 where it is not here.
        ids: (tokens, k) global ids.
        weights: (tokens, k) float.

    Returns:
        Local rows in the dtype of `ids`, and weights: row 0 and weight zero where the expert is
        not here.
    """
    rows = expert_map[ids.long()]
    here = rows >= 0
    return rows.clamp(min=0).to(ids.dtype), weights * here
