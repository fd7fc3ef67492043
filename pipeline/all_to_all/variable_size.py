"""The exchange with variable sizes, over an uneven all-to-all; the host reads the counts.

Rows are not summed here: `combine` returns one row per (token, k), and the caller adds them in a
fixed order. So outputs do not depend on the placement of experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from equipoise.hal.arguments import positive_seconds, short_text, whole_number
from equipoise.hal.communicator import Communicator
from equipoise.hal.errors import ExchangeError, GenerationMismatch
from equipoise.hal.routing import DispatchCounts
from equipoise.hal.stream import Stream


@dataclass(frozen=True)
class DispatchRoute:
    """Where the rows of one layer and step go, and what is received.

    Attributes:
        tokens: tokens of this rank, n.
        top_k: slots per token.
        send_order: int64 [sent], positions in the flattened (token, k) grid in sending order: by
            destination slot, then by position; invalid slots are not sent.
        send_counts: rows to each rank.
        recv_counts: rows from each rank.
        local_slots: int64 [sum(recv_counts)], local slot of each received row; rows are ordered by
            source rank, then by local slot.
    """

    tokens: int
    top_k: int
    send_order: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    local_slots: Tensor


class VariableSizeExchange:
    """Dispatch and combine over one communicator, on the compute stream.

    Args:
        communicator: used by this exchange only.
        slots_per_rank: slots of each rank, equal on all.
        stream: the compute stream; its programs call the methods.
        deadline: seconds that the host waits for the counts.

    Raises:
        ExchangeError: an argument is of another kind, or a number below one.
    """

    def __init__(
        self, communicator: Communicator, slots_per_rank: int, stream: Stream, deadline: float
    ) -> None:
        if not hasattr(communicator, "all_to_all_uneven"):
            got = short_text(communicator)
            raise ExchangeError(f"communicator must be what `fabric.open` returns, got {got}")
        self._communicator = communicator
        self._per_rank = whole_number("slots_per_rank", slots_per_rank, ExchangeError, least=1)
        self._stream = stream
        self._deadline = positive_seconds("deadline", deadline, ExchangeError)

    def prepare(
        self, slots: Tensor, generation: int, counts: DispatchCounts | None = None
    ) -> DispatchRoute:
        """Exchange the row counts for one layer's slot ids, unless they are known.

        Args:
            slots: int32 [n, top_k], global slot ids; those from ranks * slots_per_rank on
                mark padding.
            generation: of the routing tables that they come from.
            counts: what all ranks send, if the router knows it; then this is no collective, and
                `slots` are what it has routed, unchanged. All ranks give it, or none.

        Raises:
            ExchangeError: `slots` has another shape or dtype, or on the CPU a negative id; `counts`
                has another shape or dtype, or other rows of this rank than `slots`.
            GenerationMismatch: a peer routed with tables of another generation.
        """
        generation = whole_number("generation", generation, ExchangeError)
        total = self._communicator.size * self._per_rank
        _check_slots(slots, total)
        flat = slots.reshape(-1)
        own_counts = torch.bincount(flat, minlength=total + 1)[:total]
        send_counts = own_counts.view(self._communicator.size, self._per_rank)
        if counts is None:
            recv_matrix = self._swap_counts(send_counts, generation)
        else:
            recv_matrix = self._known_counts(counts, send_counts, generation)
        send_matrix = send_counts.cpu()
        numbers = torch.arange(self._per_rank).repeat(self._communicator.size)
        return DispatchRoute(
            tokens=slots.shape[0],
            top_k=slots.shape[1],
            send_order=torch.argsort(flat, stable=True)[: int(send_matrix.sum())],
            send_counts=tuple(send_matrix.sum(1).tolist()),
            recv_counts=tuple(recv_matrix.sum(1).tolist()),
            local_slots=numbers.repeat_interleave(recv_matrix.reshape(-1)).to(slots.device),
        )

    def dispatch(self, route: DispatchRoute, payloads: Sequence[Tensor]) -> list[Tensor]:
        """Send each token's row of every payload to each of its slots.

        Args:
            route: from `prepare`.
            payloads: tensors [n, ...], any dtype; bytes travel.

        Returns:
            One tensor [sum(recv_counts), ...] per payload.

        Raises:
            ExchangeError: a payload has not one row for each token; nothing is sent.
        """
        if isinstance(payloads, Tensor):
            raise ExchangeError("payloads must be a sequence of tensors, got one tensor")
        for number, payload in enumerate(payloads):
            _check_rows(f"payload {number}", payload, route.tokens)
        tokens = torch.div(route.send_order, route.top_k, rounding_mode="floor")
        return [self._move(p[tokens], route.recv_counts, route.send_counts) for p in payloads]

    def combine(self, route: DispatchRoute, rows: Tensor) -> Tensor:
        """Return results to the ranks of their tokens.

        Args:
            route: from `prepare`.
            rows: [sum(recv_counts), ...], in the order of `dispatch`.

        Returns:
            [n, top_k, ...]; zeros if the slot was invalid.

        Raises:
            ExchangeError: there is not one row for each that was received; nothing is sent.
        """
        _check_rows("rows", rows, sum(route.recv_counts))
        result_rows = self._move(rows, route.send_counts, route.recv_counts)
        out = rows.new_zeros((route.tokens * route.top_k, *rows.shape[1:]))
        out[route.send_order] = result_rows
        return out.view(route.tokens, route.top_k, *rows.shape[1:])

    def _swap_counts(self, send_counts: Tensor, generation: int) -> Tensor:
        """Return the rows to receive, int64 [ranks, slots_per_rank] on the host.

        The generation is sent with the counts, so that a mismatch is found before any row is sent.
        """
        generation_column = torch.full(
            (send_counts.shape[0], 1), generation, dtype=torch.int64, device=send_counts.device
        )
        header = torch.cat([generation_column, send_counts], dim=1)
        received_header = torch.empty_like(header)
        self._communicator.all_to_all(received_header, header).result(self._deadline)
        received_header = received_header.cpu()
        self._check_generations(received_header[:, 0].tolist(), generation)
        return received_header[:, 1:]

    def _known_counts(self, counts: DispatchCounts, send_counts: Tensor, generation: int) -> Tensor:
        """Return the rows to receive, int64 [ranks, slots_per_rank] on the host.

        Each rank checks what it sends itself, so that what the others expect of it is right. One
        that does not fit raises alone; the others wait for its rows, until the deadline.
        """
        ranks, own, rows = self._communicator.size, self._communicator.rank, counts.rows
        expected = (ranks, ranks * self._per_rank)
        if rows.dtype != torch.int64 or tuple(rows.shape) != expected:
            raise ExchangeError(
                f"counts: expected int64 {list(expected)}, got {rows.dtype} {list(rows.shape)}"
            )
        if len(counts.generations) != ranks:
            raise ExchangeError(
                f"counts: expected generations of {ranks} ranks, got {len(counts.generations)}"
            )
        self._check_generations(counts.generations, generation)
        if not torch.equal(rows[own], send_counts.reshape(-1).cpu()):
            raise ExchangeError(
                f"counts: the slots of rank {own} are not those that its router chose: "
                f"{int(rows[own].sum())} rows by the counts and {int(send_counts.sum())} by the "
                "slots, which have to be passed on unchanged"
            )
        return rows.view(ranks, ranks, self._per_rank)[:, own]

    def _check_generations(self, generations: Sequence[int], own: int) -> None:
        """Raises `GenerationMismatch` if a rank has another than this one."""
        for rank, generation in enumerate(generations):
            if generation != own:
                raise GenerationMismatch(
                    f"rank {rank} dispatched with generation {generation}, "
                    f"rank {self._communicator.rank} has {own}"
                )

    def _move(self, rows: Tensor, receives: Sequence[int], sends: Sequence[int]) -> Tensor:
        recv_rows = rows.new_empty((sum(receives), *rows.shape[1:]))
        into, source = _as_bytes(recv_rows), _as_bytes(rows)
        self._communicator.all_to_all_uneven(into, source, receives, sends).wait(self._stream)
        return recv_rows


def _check_slots(slots: Tensor, total: int) -> None:
    """Raises `ExchangeError` for another shape or dtype, or on the CPU for a negative slot id."""
    if slots.dim() != 2 or slots.dtype not in (torch.int32, torch.int64):
        raise ExchangeError(
            f"slots: expected int32 [tokens, top_k], got {slots.dtype} {list(slots.shape)}"
        )
    # Not on a device: reading values there would make the host wait for the stream.
    if slots.device.type == "cpu" and slots.numel():
        least = int(slots.min())
        if least < 0:
            raise ExchangeError(
                f"slots: expected 0 to {total - 1}, or {total} and above for padding, got {least}"
            )


def _check_rows(name: str, rows: Tensor, expected: int) -> None:
    """Raises `ExchangeError` unless `rows` is a tensor with `expected` rows."""
    if not isinstance(rows, Tensor) or not rows.dim() or rows.shape[0] != expected:
        got = list(rows.shape) if isinstance(rows, Tensor) else short_text(rows)
        raise ExchangeError(f"{name}: expected {expected} rows, got {got}")


def _as_bytes(rows: Tensor) -> Tensor:
    """View rows as uint8 [n, bytes of a row]: every communicator supports bytes (D3)."""
    return rows.reshape(rows.shape[0], prod(rows.shape[1:])).view(torch.uint8)
