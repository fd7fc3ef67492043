"""What a sender makes, and where."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from exploration.channel.case import Making
from torch import Tensor

from equipoise.pipeline.channel.edge import Edge
from equipoise.pipeline.channel.schema import MessageSchema
from equipoise.pipeline.channel.send import SendHandle, SendingEnd

if TYPE_CHECKING:
    from exploration.channel.run_case import Play

HUNDREDTH = 100
LentOutput = tuple[Tensor, list[float]]


def contents(step: int, rows: int, sender: int) -> dict[str, Tensor]:
    """What a sender hands over: `hidden` alike on all of them, `mine` not."""
    numbers = torch.arange(rows * 2, dtype=torch.float32).view(rows, 2)
    mine = torch.full((rows, 1), HUNDREDTH * (sender + 1) + step, dtype=torch.int64)
    return {"hidden": numbers + HUNDREDTH * (step + 1), "mine": mine}


class Maker:
    """One sender.

    Args:
        play: whose record it writes.
        rank: of the sender.
        edge: over which it sends.
    """

    def __init__(self, play: Play, rank: int, edge: Edge) -> None:
        self._play = play
        self._rank = rank
        self._edge = edge
        self._lent_outputs: list[LentOutput] = []

    def lets(self, end: SendingEnd) -> bool:
        """Whether `send` would not wait; what keeps a buffer is let go of for it."""
        if end.has_free_buffer():
            return True
        last = end._next().last_send
        if last is not None and last.is_completed():
            self.let_go()
        return end.has_free_buffer()

    def send(self, end: SendingEnd, step: int, sent_as: MessageSchema) -> SendHandle:
        """Make a step's tensors by a program, and hand them over."""
        making = self._play.case.makings[step]
        lent_tensors = {} if making is Making.OWN else end.borrow_outputs(sent_as)
        own = {
            f.name: torch.empty(f.shape, dtype=f.dtype)
            for f in sent_as.fields
            if f.name not in lent_tensors
        }
        values = contents(step, self._play.case.rows[step], self._rank)
        self._edge.stream.launch(partial(_fill, own | lent_tensors, values))
        departure = end.send(own | lent_tensors, sent_as)
        self._edge.stream.launch(partial(_scribble, own))
        if making is Making.KEPT and "mine" in lent_tensors:
            written = values["mine"].expand_as(lent_tensors["mine"]).flatten().tolist()
            self._lent_outputs.append((lent_tensors["mine"], written))
        return departure

    def let_go(self) -> None:
        """Look once more at what was kept, and keep nothing."""
        for tensor, written in self._lent_outputs:
            self._edge.stream.launch(partial(self._look, tensor, written))
        self._lent_outputs.clear()

    def _look(self, tensor: Tensor, written: list[float]) -> None:
        self._play.record.lent_reads.append((tensor.flatten().tolist(), written))


def _fill(mine: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, tensor in mine.items():
        tensor.copy_(values[name].expand_as(tensor))


def _scribble(mine: dict[str, Tensor]) -> None:
    for tensor in mine.values():
        tensor.fill_(-1)
