"""Expert-parallel exchange: token rows to the ranks that hold their experts, and back.

The portable form, over an uneven all-to-all: the host reads the counts. Rows are never summed
here: `combine` gives back one row a (token, k), and the caller adds them in its own fixed order,
which is what makes outputs independent of the placement.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from equipoise.hal.communicator import Communicator
from equipoise.hal.errors import GenerationMismatch
from equipoise.hal.stream import Stream


@dataclass(frozen=True)
class DispatchRoute:
    """Where the rows of one layer and step go, and what arrives.

    Attributes:
        tokens: tokens of this rank, n.
        top_k: slots a token.
        send_order: int64 [sent], positions in the flattened (token, k) grid in the order they travel:
            by destination slot, then by position; invalid slots do not travel.
        send_counts: rows to each rank.
        recv_counts: rows from each rank.
        local_slots: int64 [sum(receives)], local slot of each received row; rows arrive by source
            rank, then by local slot.
    """

    tokens: int
    top_k: int
    send_order: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    local_slots: Tensor


class VariableSizeExchange:
    """Dispatch and combine over one communicator, on the stream that computes.

    Args:
        communicator: used for nothing else.
        slots_per_rank: physical slots of each rank, the same everywhere.
        stream: whose programs call the methods.
        deadline: seconds that the host waits for the counts.
    """

    def __init__(
        self, communicator: Communicator, slots_per_rank: int, stream: Stream, deadline: float
    ) -> None:
        self._communicator = communicator
        self._per_rank = slots_per_rank
        self._stream = stream
        self._deadline = deadline

    def prepare(self, slots: Tensor, generation: int) -> DispatchRoute:
        """Agree on counts for one layer's slot ids.

        Args:
            slots: int32 [n, top_k], global slot ids; ranks x slots_per_rank marks padding.
            generation: of the routing tables that produced them.

        Raises:
            GenerationMismatch: a peer routed with tables of another generation.
        """
        flat = slots.reshape(-1)
        total = self._communicator.size * self._per_rank
        counts = torch.bincount(flat, minlength=total + 1)[:total]
        given = counts.view(self._communicator.size, self._per_rank)
        received, sent = self._swap_counts(given, generation), given.cpu()
        numbers = torch.arange(self._per_rank).repeat(self._communicator.size)
        return DispatchRoute(
            tokens=slots.shape[0],
            top_k=slots.shape[1],
            send_order=torch.argsort(flat, stable=True)[: int(sent.sum())],
            send_counts=tuple(sent.sum(1).tolist()),
            recv_counts=tuple(received.sum(1).tolist()),
            local_slots=numbers.repeat_interleave(received.reshape(-1)).to(slots.device),
        )

    def dispatch(self, route: DispatchRoute, payloads: Sequence[Tensor]) -> list[Tensor]:
        """Send each token's row of every payload to each of its slots.

        Args:
            route: from `prepare`.
            payloads: tensors [n, ...], any dtype; bytes travel.

        Returns:
            One tensor [sum(receives), ...] a payload.
        """
        tokens = torch.div(route.send_order, route.top_k, rounding_mode="floor")
        return [self._move(p[tokens], route.recv_counts, route.send_counts) for p in payloads]

    def combine(self, route: DispatchRoute, rows: Tensor) -> Tensor:
        """Send results back to where their tokens came from.

        Args:
            route: from `prepare`.
            rows: [sum(receives), ...], in the order of `dispatch`.

        Returns:
            [n, top_k, ...]; zeros where the slot was invalid.
        """
        back = self._move(rows, route.send_counts, route.recv_counts)
        out = rows.new_zeros((route.tokens * route.top_k, *rows.shape[1:]))
        out[route.send_order] = back
        return out.view(route.tokens, route.top_k, *rows.shape[1:])

    def _swap_counts(self, sent: Tensor, generation: int) -> Tensor:
        """Rows to expect, int64 [ranks, slots_per_rank] on the host.

        The header carries the generation.
        """
        stamp = torch.full((sent.shape[0], 1), generation, dtype=torch.int64, device=sent.device)
        header = torch.cat([stamp, sent], dim=1)
        answers = torch.empty_like(header)
        self._communicator.all_to_all(answers, header).result(self._deadline)
        arrived = answers.cpu()
        for rank, theirs in enumerate(arrived[:, 0].tolist()):
            if theirs != generation:
                raise GenerationMismatch(
                    f"rank {rank} dispatched with generation {theirs}, "
                    f"rank {self._communicator.rank} has {generation}"
                )
        return arrived[:, 1:]

    def _move(self, rows: Tensor, receives: Sequence[int], sends: Sequence[int]) -> Tensor:
        arrived = rows.new_empty((sum(receives), *rows.shape[1:]))
        into, source = _as_bytes(arrived), _as_bytes(rows)
        self._communicator.all_to_all_uneven(into, source, receives, sends).wait(self._stream)
        return arrived


def _as_bytes(rows: Tensor) -> Tensor:
    """uint8 [n, bytes of a row], over the same memory: every communicator carries bytes (D3)."""
    return rows.reshape(rows.shape[0], prod(rows.shape[1:])).view(torch.uint8)
