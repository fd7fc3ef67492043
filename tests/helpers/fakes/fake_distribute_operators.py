"""Stand-ins for torch_npu's distributed dispatch and combine, on the host: what their pages say."""

import torch
import torch.distributed as dist
from helpers.fakes.fake_expert_buffers import gather
from torch import Tensor

ROOM = 7
"""Rows of `expand_x` after those in use."""


def npu_moe_distribute_dispatch(  # noqa: PLR0913 - as published
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    expert_scales: Tensor | None = None,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
) -> tuple[Tensor, None, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    assert expert_ids.dtype == torch.int32
    assert 0 < x.shape[0] <= global_bs // ep_world_size
    local = moe_expert_num // ep_world_size
    by_expert: list[list[tuple[int, int, int, Tensor]]] = [[] for _ in range(local)]
    for source, (tokens, ids) in enumerate(gather(dist.group.WORLD, (x, expert_ids))):
        for token, choices in enumerate(ids.tolist()):
            for choice, expert in enumerate(choices):
                if expert // local == ep_rank_id:
                    by_expert[expert % local].append((source, token, choice, tokens[token]))
    rows = [row for own in by_expert for row in own]
    expanded = torch.full((len(rows) + ROOM, x.shape[1]), float("nan"), dtype=x.dtype)
    for number, row in enumerate(rows):
        expanded[number] = row[3]
    counts = torch.tensor([len(own) for own in by_expert])
    # Which elements the other outputs have is for the combine alone.
    places = torch.tensor([row[:3] for row in rows], dtype=torch.int32).view(-1, 3)
    scales = torch.empty(0) if expert_scales is not None else None
    return expanded, None, places, counts, counts.cumsum(0), torch.empty(0), scales


def npu_moe_distribute_combine(  # noqa: PLR0913 - as published
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
) -> Tensor:
    used = expand_x[: expand_idx.shape[0]]
    out = torch.zeros(expert_ids.shape[0], expand_x.shape[1], dtype=torch.float32)
    for places, rows in gather(dist.group.WORLD, (expand_idx.tolist(), used)):
        for (home, token, choice), row in zip(places, rows, strict=True):
            if home == ep_rank_id:
                out[token] += expert_scales[token, choice] * row.float()
    return out.to(expand_x.dtype)
