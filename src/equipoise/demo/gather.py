"""What the ranks measured and produced, brought together: sums of parts that do not overlap."""

import numpy as np
import torch
from torch import Tensor

from equipoise.demo.record import Counts
from equipoise.demo.requests import DIGEST_BYTES
from equipoise.demo.serve import Meter
from equipoise.hal.communicator import Communicator


class Gatherer:
    """Sums over ranks on one communicator, each within `deadline` seconds; collective.

    Args:
        communicator: used for nothing else.
        device: where what travels has to be.
        deadline: seconds.
    """

    def __init__(self, communicator: Communicator, device: torch.device, deadline: float) -> None:
        self._communicator = communicator
        self._device = device
        self._deadline = deadline

    def rank_rows(self, meter: Meter, place: int, places: int) -> Counts:
        """(steps, layers, places): every rank's rows in the column of its place in its stage."""
        grid = torch.zeros((*meter.rows.shape, places), dtype=torch.int64)
        grid[..., place] = torch.from_numpy(meter.rows)
        return self._sum(grid).numpy()

    def expert_rows(self, meter: Meter) -> Counts:
        """(steps, layers, experts): what all ranks' tokens asked for."""
        return self._sum(torch.from_numpy(meter.experts.copy())).numpy()

    def slowest(self, meter: Meter) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """(steps,): seconds of the slowest rank."""
        mine = torch.from_numpy(meter.seconds).view(torch.uint8).to(self._device)
        everybody = mine.new_empty((self._communicator.size, *mine.shape))
        self._communicator.all_gather(everybody, mine).result(self._deadline)
        return everybody.cpu().view(torch.float64).amax(dim=0).numpy()

    def digests(self, finished: dict[int, bytes], requests: int) -> dict[int, bytes]:
        """Digest of every request, whoever served it."""
        table = torch.zeros((requests, DIGEST_BYTES), dtype=torch.int32)
        for number, digest in finished.items():
            table[number] = torch.tensor(list(digest), dtype=torch.int32)
        total = self._sum(table).to(torch.uint8)
        return {number: bytes(row) for number, row in enumerate(total.tolist())}

    def texts(self, mine: str) -> list[str]:
        """What every rank says, in order of rank; UTF-8 travels."""
        data = torch.tensor(list(mine.encode()) or [0], dtype=torch.uint8)
        sizes = torch.zeros(self._communicator.size, dtype=torch.int64)
        sizes[self._communicator.rank] = len(mine.encode())
        lengths = self._sum(sizes).tolist()
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(data)] = data[: len(padded)]
        sent = padded.to(self._device)
        everybody = sent.new_empty((self._communicator.size, len(sent)))
        self._communicator.all_gather(everybody, sent).result(self._deadline)
        rows = everybody.cpu().numpy()
        return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]

    def _sum(self, tensor: Tensor) -> Tensor:
        total = tensor.to(self._device)
        self._communicator.all_reduce(total).result(self._deadline)
        return total.cpu()
