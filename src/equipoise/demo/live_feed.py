"""What a live display is told: the events of rank 0, as messages of JSON.

A message is a dictionary whose `live` says what it is:

| live | further keys |
|---|---|
| load | step; rank_rows (layers, ranks): rows of that step; text: what a request reads and writes |
| step | step; seconds |
| state | state of the engine; rebalance, or None |
| moves | rebalance; count; moves: the first ones, each (layer, expert, from rank, to rank) |
| ended | rebalance, step, outcome, copies, bytes, seconds; moves: as above, from rank -1 |
| dropped | count of events that are missing |

Steps are those of the serve loop, layers and ranks those of this rank's stage.
"""

from codecs import getincrementaldecoder
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.runtime.events import (
    BatchSampled,
    Event,
    EventsDropped,
    RebalanceEnded,
    StateChanged,
    StepDone,
    TransferStarted,
)
from equipoise.demo.progress import LiveMessage
from equipoise.demo.scheduler import RunningRequest

MAX_MOVES = 64
"""Moves named in a message: more than any screen shows at a glance."""
PROMPT_BYTES_SHOWN = 64
"""Of a prompt's end."""
HOST = -1
"""In place of a rank: weights come from the host's memory."""


class LiveFeed:
    """An event sink that tells a live display what happens.

    Args:
        send: gets each message; called on the thread of the event sinks, and may block there.
        forwards_per_step: forward passes of a step, which the engine counts.
    """

    def __init__(self, send: Callable[[LiveMessage], None], forwards_per_step: int) -> None:
        self._send = send
        self._forwards_per_step = forwards_per_step
        self._request: RunningRequest | None = None
        self._announced: set[int] = set()

    def follow(self, newest: RunningRequest | None, new_tokens: int) -> None:
        """Show a request until it has all its tokens or the text switches, then the `newest`.

        For the serve loop, each step: it leaves a reference, and waits for nothing.
        """
        if newest is None:
            return
        shown = self._request
        over = shown is None or len(shown.tokens) >= new_tokens
        if over or (shown is not None and shown.request.phase != newest.request.phase):
            self._request = newest

    def emit(self, event: Event) -> None:
        """See `EventSink`."""
        match event:
            case StepDone(step, begin, end):
                self._send({"live": "step", "step": step, "seconds": end - begin})
            case BatchSampled(step, counts, layout, shape, rank_rows):
                rows = rank_rows(counts, layout, shape, step).tolist()
                step //= self._forwards_per_step
                self._send({"live": "load", "step": step, "rank_rows": rows, "text": self._text()})
            case StateChanged(_, _, state, rebalance):
                self._send({"live": "state", "state": state, "rebalance": rebalance})
            case TransferStarted():
                self._send(_moves(event))
                self._announced.add(event.rebalance)
            case RebalanceEnded():
                self._send(self._ended(event))
            case EventsDropped(count):
                self._send({"live": "dropped", "count": count})

    def close(self) -> None:
        """A pass is over; the next one tells the same display."""
        self._request = None
        self._announced.clear()

    def _text(self) -> list[str]:
        """The end of the prompt, and what the model has written after it."""
        if (request := self._request) is None:
            return ["", ""]
        prompt = request.request.prompt[-PROMPT_BYTES_SHOWN:].lstrip(bytes(range(0x80, 0xC0)))
        # A character that the prompt leaves unfinished is completed by the model.
        unfinished = len(prompt.decode(errors="ignore").encode())
        written = prompt[unfinished:] + bytes(request.tokens)
        # The decoder keeps a last character to itself until its other bytes have come.
        text = getincrementaldecoder("utf-8")("replace").decode(written)
        return [prompt[:unfinished].decode(errors="ignore"), text]

    def _ended(self, event: RebalanceEnded) -> LiveMessage:
        record = event.record
        before, after = event.placements
        layers, slots = np.nonzero(before != after)
        # Without a transfer between ranks weights have come from the host's memory.
        fresh = record.number not in self._announced and record.copies > 0
        per_rank = event.shape.slots_per_rank
        to_rank = slots // per_rank
        moves = _rows(layers, after[layers, slots], np.full_like(to_rank, HOST), to_rank)
        return {
            "live": "ended",
            "rebalance": record.number,
            "step": record.ended_at // self._forwards_per_step,
            "outcome": record.outcome,
            "copies": record.copies,
            "bytes": record.bytes_moved,
            "seconds": event.end - event.begin,
            "moves": moves if fresh else [],
        }


def _moves(event: TransferStarted) -> LiveMessage:
    """Copies between ranks; those within a rank move nothing."""
    per_rank = event.shape.slots_per_rank
    source, target = event.sources // per_rank, event.slots // per_rank
    remote = source != target
    columns = (event.layers, event.experts, source, target)
    return {
        "live": "moves",
        "rebalance": event.rebalance,
        "count": int(remote.sum()),
        "moves": _rows(*(column[remote] for column in columns)),
    }


def _rows(*columns: npt.NDArray[np.integer]) -> list[list[int]]:
    rows = zip(*(column[:MAX_MOVES].tolist() for column in columns), strict=True)
    return [list(row) for row in rows]
