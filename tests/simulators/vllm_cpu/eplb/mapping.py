"""From logical experts to slots, and the counts of load, with torch alone."""

import torch

KNUTH = 2654435769
"""floor(2**32 / golden ratio): the multiplier of vLLM's own kernel, so that tokens take the same
replicas as there."""


def map_and_record(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slot of each chosen expert; a token takes the replica that its number hashes to.

    Args:
        topk_ids: (tokens, k) logical experts.
        expert_load_view: (slots,) int32, added to where `record_enabled`.
        logical_to_physical_map: (experts, replicas), -1 where there is none.
        logical_replica_count: (experts,).
        record_enabled: a bool without dimensions.
        num_unpadded_tokens: tokens that count as load; all of them, where there is none.
    """
    experts = topk_ids.long()
    tokens = torch.arange(experts.shape[0]).unsqueeze(1)
    replica = (tokens * KNUTH & 0xFFFFFFFF) % logical_replica_count[experts].clamp(min=1)
    slots = logical_to_physical_map[experts, replica]
    if bool(record_enabled):
        real = slots if num_unpadded_tokens is None else slots[: int(num_unpadded_tokens)]
        counted_slots = real.flatten().long()
        expert_load_view.scatter_add_(
            0, counted_slots, torch.ones_like(counted_slots, dtype=torch.int32)
        )
    return slots.to(topk_ids.dtype)
