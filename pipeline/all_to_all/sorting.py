"""Sorting of a batch by destination rank, without reading values on the host.

All shapes depend on the shape of the batch and on the format only, so that a graph may capture it.
The index of an unused position points one past the end.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.pipeline.all_to_all.formats import ExchangeFormat


@dataclass(frozen=True, eq=False)
class SortedBatch:
    """Where the rows of a batch of n tokens go, and where their results arrive.

    Attributes:
        tokens: int64 [ranks, capacity], the token of each row; n if there is none.
        choices: int32 [n + 1, ranks, top_k], for each destination the local slot of each choice of
            a token that falls there, else invalid; token n, which stands for none, has none.
        result_positions: int64 [n * top_k], rank * result_capacity + position of the result of
            each (token, choice); ranks * result_capacity if there is none.
        rows: int32 [ranks], rows for each rank, up to the capacity.
        overflow: int32 [2], rows and results by which the fullest message exceeds its capacity.
        inactive_rank_hits: int64 [], number of choices that fall on inactive ranks.
    """

    tokens: Tensor
    choices: Tensor
    result_positions: Tensor
    rows: Tensor
    overflow: Tensor
    inactive_rank_hits: Tensor


@dataclass(frozen=True, eq=False)
class _Destinations:
    """Rank and local slot of each choice, [n, top_k]; one past the last if it is invalid."""

    rank: Tensor
    local_slot: Tensor
    inactive_rank_hits: Tensor


def sort_batch(slots: Tensor, form: ExchangeFormat, active: Tensor) -> SortedBatch:
    """Sort the choices of a batch.

    Args:
        slots: int32 [n, top_k], global slot ids.
        form: of the exchange.
        active: bool [ranks + 1], from `transport.active_mask`.
    """
    destinations = _destinations(slots, form, active)
    here = destinations.rank[:, :, None] == torch.arange(
        form.ranks, device=slots.device
    )  # [n, k, ranks]
    travels = here.any(1)  # [n, ranks]: once to a rank, whatever it chose there
    row = travels.cumsum(0) - 1
    counts, results = travels.sum(0), here.sum((0, 1))
    overflow = torch.stack(
        [(counts - form.capacity).amax(), (results - form.result_capacity).amax()]
    )
    choices = torch.where(
        here.transpose(1, 2), destinations.local_slot[:, None, :], form.invalid_slot
    )
    padding_row = choices.new_full((1, *choices.shape[1:]), form.invalid_slot)
    return SortedBatch(
        tokens=_token_of_row(travels, row, form),
        choices=torch.cat([choices, padding_row]).int(),
        result_positions=_result_positions(destinations, here, row, form),
        rows=counts.clamp(max=form.capacity).int(),
        overflow=overflow.clamp(min=0).int(),
        inactive_rank_hits=destinations.inactive_rank_hits,
    )


def _destinations(slots: Tensor, form: ExchangeFormat, active: Tensor) -> _Destinations:
    flat = slots.long()
    inside = (flat >= 0) & (flat < form.num_slots)
    home = torch.where(inside, flat.div(form.slots_per_rank, rounding_mode="floor"), form.ranks)
    is_active = active[home]
    return _Destinations(
        rank=torch.where(is_active, home, form.ranks),
        local_slot=torch.where(is_active, flat % form.slots_per_rank, form.invalid_slot),
        inactive_rank_hits=(inside & ~is_active).sum(),
    )


def _token_of_row(travels: Tensor, row: Tensor, form: ExchangeFormat) -> Tensor:
    """Invert `row`: return the token in each row of each message."""
    count, ranks = travels.shape
    spare = form.ranks * form.capacity
    starts = torch.arange(ranks, device=row.device) * form.capacity
    index = torch.where(travels & (row < form.capacity), starts + row, spare)
    tokens = row.new_full((spare + 1,), count)
    numbers = torch.arange(count, device=row.device)[:, None].expand(count, ranks)
    tokens.scatter_(0, index.reshape(-1), numbers.reshape(-1))
    return tokens[:spare].view(form.ranks, form.capacity)


def _result_positions(
    destinations: _Destinations, here: Tensor, row: Tensor, form: ExchangeFormat
) -> Tensor:
    """Return where each result arrives: by rank, token and choice, in the order of the entries
    there.

    Rows beyond the capacity are the last ones, so leaving them out shifts no others.
    """
    home = destinations.rank.reshape(-1, 1)
    clamped_rank = home.clamp(max=form.ranks - 1)
    position = (here.reshape(-1, form.ranks).cumsum(0) - 1).gather(1, clamped_rank)
    rows = row.gather(1, clamped_rank.view(-1, form.top_k)).view(-1, 1)
    fits = (home < form.ranks) & (rows < form.capacity) & (position < form.result_capacity)
    positions = torch.where(fits, home * form.result_capacity + position, form.max_entries)
    return positions.view(-1)


def list_entries(ids: Tensor, active: Tensor, form: ExchangeFormat) -> tuple[Tensor, Tensor]:
    """List the entries of received rows.

    Args:
        ids: int32 [ranks, capacity, top_k], local slots by source.
        active: bool [ranks]; inactive ranks sent nothing.
        form: of the exchange.

    Returns:
        Rows, int64 [entries], and local slots, int32 [entries], as `ReceivedRows` has them.
    """
    flat = ids.reshape(form.ranks, -1)
    valid = (flat < form.invalid_slot) & active[:, None]
    position = valid.cumsum(1) - 1
    starts = torch.arange(form.ranks, device=ids.device)[:, None] * form.result_capacity
    fits = valid & (position < form.result_capacity)
    index = torch.where(fits, starts + position, form.max_entries).view(-1)
    row = torch.arange(form.ranks * form.capacity, device=ids.device).repeat_interleave(form.top_k)
    rows = row.new_zeros(form.max_entries + 1).scatter_(0, index, row)
    slots = flat.new_full((form.max_entries + 1,), form.invalid_slot).scatter_(
        0, index, flat.reshape(-1)
    )
    return rows[: form.max_entries], slots[: form.max_entries]
