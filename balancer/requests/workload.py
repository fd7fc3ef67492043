"""Workloads: requests over time, which a simulation serves and a load client sends.

A request has a prompt and an output, in tokens, and may have hashes of the blocks of its prompt:
two prompts that begin with the same blocks begin with the same ids, so ids show what a prefix cache
could reuse.
"""

from dataclasses import dataclass, replace
from enum import IntEnum, unique
from math import isfinite
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from equipoise.hal.errors import UsageError


@unique
class RandomStream(IntEnum):
    """The streams of random numbers of a seed: one per purpose, so that sizes and times do not
    come from the same bits and correlate."""

    SIZES = 0
    ORDER = 1
    SAMPLE = 2
    ARRIVALS = 3


def random_generator(seed: int, stream: RandomStream) -> np.random.Generator:
    """Returns PCG64 of the seed for `SIZES`, and of a child of the seed for other streams.

    Raises UsageError for a seed that is negative or no integer.
    """
    if type(seed) is not int or seed < 0:
        raise UsageError(f"a seed is a whole number from 0 on, not {seed!r}")
    key = () if stream is RandomStream.SIZES else (int(stream),)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


Counts: TypeAlias = npt.NDArray[np.int64]
BlockHashes: TypeAlias = tuple[Counts, Counts]
"""int64 [h] ids, none negative, and int64 [n + 1] offsets; request i has
ids[offsets[i] : offsets[i + 1]]."""


def check_block_hashes(hashes: BlockHashes, prompts: Counts, block: int) -> None:
    """Raises `UsageError` unless the hashes fit the prompts, in blocks of `block` tokens."""
    ids, offsets = hashes
    if any(array.ndim != 1 or array.dtype != np.int64 for array in hashes):
        raise UsageError("hashes are two int64 arrays of one axis: ids, and offsets into them")
    if offsets.size != prompts.size + 1:
        raise UsageError(f"{offsets.size} offsets of hashes, expected {prompts.size + 1}")
    if offsets[0] != 0 or offsets[-1] != ids.size or (np.diff(offsets) < 0).any():
        raise UsageError(f"offsets of hashes do not rise from 0 to {ids.size}")
    if ids.size and ids.min() < 0:
        raise UsageError(f"hash {int(np.argmax(ids < 0))} is {ids[ids < 0][0]}, below 0")
    beyond = np.flatnonzero(np.diff(offsets) > -(-prompts // block))
    if beyond.size:
        row = int(beyond[0])
        raise UsageError(
            f"request {row}: {offsets[row + 1] - offsets[row]} hashes for {prompts[row]} tokens in "
            f"blocks of {block}"
        )


def select_hashes(hashes: BlockHashes, rows: Counts) -> BlockHashes:
    """Returns the hashes of requests `rows` (int64 [m]), in that order."""
    ids, offsets = hashes
    lengths = np.diff(offsets)[rows]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    # Old position of each new id: its new position plus the shift of its request.
    shifts = np.repeat(offsets[:-1][rows] - ends[:-1], lengths)
    return ids[np.arange(ends[-1]) + shifts], ends


@dataclass(frozen=True)
class TokenLengths:
    """Statistics of the lengths of prompts or outputs, in tokens; percentiles are interpolated.

    Attributes:
        mean: the mean.
        p50: the median.
        p95: the 95th percentile.
        most: the largest.
    """

    mean: float
    p50: float
    p95: float
    most: int

    @staticmethod
    def of(counts: Counts) -> "TokenLengths":
        """Computes them of int64 [n], n >= 1."""
        half, high = np.percentile(counts, [50, 95])
        return TokenLengths(float(counts.mean()), float(half), float(high), int(counts.max()))


@dataclass(frozen=True)
class WorkloadSummary:
    """Statistics of a workload; None if there is no data for one.

    Attributes:
        count: number of requests.
        span: seconds from the first arrival to the last.
        rate: requests per second, (count - 1) / span.
        variation: standard deviation of the gaps between arrivals over their mean; 1 for Poisson
            arrivals.
        prompts: lengths of prompts.
        outputs: lengths of outputs.
        correlation: Pearson's, of prompt and output length.
        reuse: fraction of the block hashes that occurred before: the hit rate of an unbounded
            prefix cache.
    """

    count: int
    span: float | None
    rate: float | None
    variation: float | None
    prompts: TokenLengths
    outputs: TokenLengths
    correlation: float | None
    reuse: float | None


def correlation(prompts: Counts, outputs: Counts) -> float | None:
    """Returns Pearson's correlation; None if an argument is constant."""
    if np.ptp(prompts) == 0 or np.ptp(outputs) == 0:
        return None
    return float(np.corrcoef(prompts, outputs)[0, 1])


def prefix_reuse(hashes: BlockHashes | None) -> float | None:
    """Returns the fraction of the ids that occurred before; None without ids."""
    if hashes is None or not hashes[0].size:
        return None
    return float(1 - np.unique(hashes[0]).size / hashes[0].size)


Seconds: TypeAlias = npt.NDArray[np.float64]
Kind = TypeVar("Kind", bound=np.generic)
MAX_TOKENS = (1 << 31) - 1
"""Upper limit of a prompt or output: sums over 2^32 requests stay within 64 bits."""
BLOCK_TOKENS = 512
"""Tokens per hashed block in Mooncake's traces."""


@dataclass(frozen=True, eq=False)
class Workload:
    """n >= 1 requests in order of arrival; arrays are read-only. Raises `UsageError`.

    Attributes:
        name: name in reports.
        arrivals: float64 [n], seconds since the first arrival, ascending; None if the source has no
            times.
        prompts: int64 [n], tokens, 1 to `MAX_TOKENS`.
        outputs: int64 [n], tokens, 1 to `MAX_TOKENS`.
        hashes: of the blocks of the prompts, see `BlockHashes`: at most one per block, of which the
            last may be partly filled. None where the source has none.
        block: tokens per block.
        notes: texts for reports: what was dropped, sorted or estimated.
    """

    name: str
    arrivals: Seconds | None
    prompts: Counts
    outputs: Counts
    hashes: BlockHashes | None = None
    block: int = BLOCK_TOKENS
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompts", "outputs"):
            object.__setattr__(self, name, _tokens(name, getattr(self, name)))
        if self.prompts.size != self.outputs.size:
            raise UsageError(f"{self.prompts.size} prompts and {self.outputs.size} outputs")
        if self.arrivals is not None:
            object.__setattr__(self, "arrivals", _check_arrivals(self.arrivals, self.count))
        if self.block < 1:
            raise UsageError(f"a block has {self.block} tokens")
        if self.hashes is not None:
            check_block_hashes(self.hashes, self.prompts, self.block)
            ids, offsets = self.hashes
            object.__setattr__(self, "hashes", (_read_only(ids), _read_only(offsets)))

    @property
    def count(self) -> int:
        """Number of requests."""
        return int(self.prompts.size)

    def block_hashes_of(self, request: int) -> Counts:
        """Returns the block hashes of one request. Raises `UsageError` if there are none."""
        if self.hashes is None:
            raise UsageError(f"{self.name} has no hashes of prompts")
        ids, offsets = self.hashes
        return ids[offsets[request] : offsets[request + 1]]

    def same_requests(self, other: "Workload") -> bool:
        """Returns whether the requests are equal; ignores name and notes."""
        own_arrays, other_arrays = self._arrays(), other._arrays()
        return self.block == other.block and all(
            (a is None) == (b is None) and (a is None or np.array_equal(a, np.asarray(b)))
            for a, b in zip(own_arrays, other_arrays, strict=True)
        )

    def first(self, count: int) -> "Workload":
        """Returns the first `count` requests. Raises `UsageError` if there are fewer."""
        if not 1 <= count <= self.count:
            raise UsageError(f"{self.name} has {self.count} requests: cannot take {count}")
        return self._select(np.arange(count), self.arrivals)

    def shuffled(self, seed: int) -> "Workload":
        """Returns the same requests in another order, at the same arrival times.

        Each request keeps its prompt, output and hashes. Requests that share a prefix no longer
        arrive close together.
        """
        order = random_generator(seed, RandomStream.ORDER).permutation(self.count)
        return self._select(order, self.arrivals)

    def resampled(self, seed: int) -> "Workload":
        """Draws as many requests with replacement, at the same arrival times (bootstrap).

        The distribution of (prompt, output) pairs stays, the order does not. Hashes are dropped: a
        request that is drawn twice would find its whole prompt in the cache.
        """
        rows = random_generator(seed, RandomStream.SAMPLE).integers(0, self.count, self.count)
        sample = replace(self, hashes=None)._select(rows, self.arrivals)
        return (
            sample
            if self.hashes is None
            else sample._with_note("prefix hashes ignored: resampling destroys their order")
        )

    def with_poisson_arrivals(self, rate: float, seed: int) -> "Workload":
        """Returns the same requests with Poisson arrivals, `rate` per second on average.

        Raises UsageError for a rate that is not above 0.
        """
        gaps = random_generator(seed, RandomStream.ARRIVALS).standard_exponential(self.count - 1)
        arrivals = np.concatenate([[0.0], np.cumsum(gaps / _check_rate(rate))])
        return replace(self, arrivals=arrivals)

    def scaled_to_rate(self, rate: float) -> "Workload":
        """Scales the arrival times so that (n - 1) / span is `rate` per second.

        Raises UsageError for a rate that is not above 0, and if there are no times to scale.
        """
        span = (self.count - 1) / _check_rate(rate)
        if self.arrivals is None or not self.arrivals[-1] > 0:
            raise UsageError(f"{self.name} has no times that could be scaled to a rate")
        return replace(self, arrivals=self.arrivals * (span / float(self.arrivals[-1])))

    def with_prompt_limit(self, limit: int) -> "Workload":
        """Drops requests with longer prompts; a note counts them.

        The first remaining request arrives at 0.0. Raises `UsageError` if none remains.
        """
        rows = np.flatnonzero(self.prompts <= limit)
        if not rows.size:
            raise UsageError(f"{self.name} has no request with a prompt of at most {limit} tokens")
        if rows.size == self.count:
            return self
        arrivals = None if self.arrivals is None else self.arrivals[rows] - self.arrivals[rows[0]]
        dropped = f"{self.count - rows.size} of {self.count} requests"
        return self._select(rows, arrivals)._with_note(
            f"{dropped} had prompts over {limit}: dropped"
        )

    def summary(self) -> WorkloadSummary:
        """Computes the statistics of the workload."""
        span = None if self.arrivals is None else float(self.arrivals[-1])
        return WorkloadSummary(
            self.count,
            span,
            (self.count - 1) / span if span else None,
            self._variation() if span else None,
            TokenLengths.of(self.prompts),
            TokenLengths.of(self.outputs),
            correlation(self.prompts, self.outputs),
            prefix_reuse(self.hashes),
        )

    def _variation(self) -> float:
        gaps = np.diff(np.asarray(self.arrivals))
        return float(gaps.std() / gaps.mean())

    def _arrays(self) -> tuple[npt.NDArray[np.generic] | None, ...]:
        return (self.arrivals, self.prompts, self.outputs, *(self.hashes or (None, None)))

    def _select(self, rows: Counts, arrivals: Seconds | None) -> "Workload":
        """Returns requests `rows`, which arrive at the first of `arrivals`."""
        return replace(
            self,
            arrivals=None if arrivals is None else arrivals[: rows.size],
            prompts=self.prompts[rows],
            outputs=self.outputs[rows],
            hashes=None if self.hashes is None else select_hashes(self.hashes, rows),
        )

    def _with_note(self, note: str) -> "Workload":
        return replace(self, notes=(*self.notes, note))


def _tokens(name: str, counts: Counts) -> Counts:
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or not counts.size:
        raise UsageError(f"{name} are integers [n], n >= 1, not {counts.dtype} {counts.shape}")
    wrong = np.flatnonzero((counts < 1) | (counts > MAX_TOKENS))
    if wrong.size:
        row = int(wrong[0])
        raise UsageError(f"request {row}: {name} are 1 to {MAX_TOKENS} tokens, not {counts[row]}")
    return _read_only(counts.astype(np.int64, copy=False))


def _check_arrivals(arrivals: Seconds, count: int) -> Seconds:
    if arrivals.shape != (count,) or arrivals.dtype != np.float64:
        shape = f"{arrivals.dtype} {arrivals.shape}"
        raise UsageError(f"arrivals are float64 ({count},), one for each request, not {shape}")
    if arrivals[0] != 0 or not np.isfinite(arrivals).all():
        raise UsageError("arrivals are finite seconds from the first, which is 0")
    wrong = np.flatnonzero(np.diff(arrivals) < 0)
    if wrong.size:
        row = int(wrong[0]) + 1
        raise UsageError(f"request {row} arrives at {arrivals[row]}, before the one before it")
    return _read_only(arrivals)


def _check_rate(rate: float) -> float:
    if not (isfinite(rate) and rate > 0):
        raise UsageError(f"a rate is above 0 requests per second, not {rate}")
    return rate


def _read_only(array: npt.NDArray[Kind]) -> npt.NDArray[Kind]:
    view = array.view()
    view.setflags(write=False)
    return view
