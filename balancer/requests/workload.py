"""Seeds to generators of random numbers: one stream for each purpose.

Hashes of the blocks of prompts: flat ids, and where those of each request begin.

Two prompts that begin with the same blocks begin with the same ids, so ids tell what a prefix cache
could keep.

What a workload looks like, in a few figures.

Requests that arrive over time: what a simulation runs on, and a load client sends.
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
    """What is drawn. Sizes and times of one seed must not come of the same bits: they would be
    correlated."""

    SIZES = 0
    ORDER = 1
    SAMPLE = 2
    ARRIVALS = 3


def random_generator(seed: int, purpose: RandomStream) -> np.random.Generator:
    """PCG64 of the seed; for all but `SIZES`, of a child of the seed.

    Raises: UsageError for a seed that is negative or no integer.
    """
    if type(seed) is not int or seed < 0:
        raise UsageError(f"a seed is a whole number from 0 on, not {seed!r}")
    key = () if purpose is RandomStream.SIZES else (int(purpose),)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


Counts: TypeAlias = npt.NDArray[np.int64]
BlockHashes: TypeAlias = tuple[Counts, Counts]
"""int64 [h] ids, none negative, and int64 [n + 1] offsets: of request i are ids[offsets[i] :
offsets[i + 1]]."""


def check_block_hashes(hashes: BlockHashes, prompts: Counts, block: int) -> None:
    """Raise `UsageError` unless these are hashes of such prompts, of `block` tokens each."""
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
    """Those of requests `rows` (int64 [m]), in that order."""
    ids, offsets = hashes
    lengths = np.diff(offsets)[rows]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    # Position in the new ids, plus by how much the row that it is of has moved.
    moved = np.repeat(offsets[:-1][rows] - ends[:-1], lengths)
    return ids[np.arange(ends[-1]) + moved], ends


@dataclass(frozen=True)
class TokenLengths:
    """Tokens of prompts, or of outputs; p50 and p95 are interpolated.

    Attributes:
        mean: the average.
        p50: the median.
        p95: what one in twenty is above.
        most: the largest.
    """

    mean: float
    p50: float
    p95: float
    most: int

    @staticmethod
    def of(counts: Counts) -> "TokenLengths":
        """Of int64 [n], n >= 1."""
        half, high = np.percentile(counts, [50, 95])
        return TokenLengths(float(counts.mean()), float(half), float(high), int(counts.max()))


@dataclass(frozen=True)
class WorkloadSummary:
    """Figures of a workload; None where there is nothing to compute them of.

    Attributes:
        count: requests.
        span: seconds from the first arrival to the last.
        rate: requests per second, (count - 1) / span.
        variation: standard deviation of the gaps between arrivals over their mean; Poisson has 1.
        prompts: tokens of prompts.
        outputs: tokens of outputs.
        correlation: Pearson's, of prompt and output.
        reuse: the part of the block hashes that came before, which a prefix cache without limits
            would hit.
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
    """Pearson's; None where one of them is constant."""
    if np.ptp(prompts) == 0 or np.ptp(outputs) == 0:
        return None
    return float(np.corrcoef(prompts, outputs)[0, 1])


def prefix_reuse(hashes: BlockHashes | None) -> float | None:
    """The part of the ids that another one of the same value comes before."""
    if hashes is None or not hashes[0].size:
        return None
    return float(1 - np.unique(hashes[0]).size / hashes[0].size)


Seconds: TypeAlias = npt.NDArray[np.float64]
Kind = TypeVar("Kind", bound=np.generic)
MAX_TOKENS = (1 << 31) - 1
"""Tokens of a prompt or of an output at most: sums over 2^32 requests stay within 64 bits."""
BLOCK_TOKENS = 512
"""Tokens of a block with a hash, in Mooncake's traces."""


@dataclass(frozen=True, eq=False)
class Workload:
    """n >= 1 requests in order of arrival; arrays are read-only. Raises `UsageError`.

    Attributes:
        name: for people.
        arrivals: float64 [n], seconds from the first, which is 0.0, never falling; None where
            the source has no times.
        prompts: int64 [n], tokens, 1 to `MAX_TOKENS`.
        outputs: int64 [n], tokens, 1 to `MAX_TOKENS`.
        hashes: of the blocks of the prompts, see `BlockHashes`: at most one per block, of which the
            last may be partly filled. None where the source has none.
        block: tokens of a block.
        notes: what was dropped, sorted or estimated on the way, for people.
    """

    name: str
    arrivals: Seconds | None
    prompts: Counts
    outputs: Counts
    hashes: BlockHashes | None = None
    block: int = BLOCK_TOKENS
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what in ("prompts", "outputs"):
            object.__setattr__(self, what, _tokens(what, getattr(self, what)))
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
        """How many requests."""
        return int(self.prompts.size)

    def block_hashes_of(self, request: int) -> Counts:
        """Hashes of the blocks of one request's prompt. Raises `UsageError` without hashes."""
        if self.hashes is None:
            raise UsageError(f"{self.name} has no hashes of prompts")
        ids, offsets = self.hashes
        return ids[offsets[request] : offsets[request + 1]]

    def same_requests(self, other: "Workload") -> bool:
        """Whether the requests are the same, whatever name and notes say."""
        mine, theirs = self._arrays(), other._arrays()
        return self.block == other.block and all(
            (a is None) == (b is None) and (a is None or np.array_equal(a, np.asarray(b)))
            for a, b in zip(mine, theirs, strict=True)
        )

    def first(self, count: int) -> "Workload":
        """The first `count`. Raises `UsageError` where there are not so many."""
        if not 1 <= count <= self.count:
            raise UsageError(f"{self.name} has {self.count} requests: cannot take {count}")
        return self._select(np.arange(count), self.arrivals)

    def shuffled(self, seed: int) -> "Workload":
        """The same requests in another order, at the same times.

        Kept: every request with its prompt, output and hashes; when one arrives. Lost: which one
        arrives then, and with it the nearness of requests that share a prefix.
        """
        order = random_generator(seed, RandomStream.ORDER).permutation(self.count)
        return self._select(order, self.arrivals)

    def resampled(self, seed: int) -> "Workload":
        """As many requests drawn with replacement: several seeds of one trace (bootstrap).

        Kept: the distribution of (prompt, output) pairs, and when requests arrive. Lost: their
        order; and the hashes, since a request that is drawn twice would find all of its prompt in
        the cache.
        """
        rows = random_generator(seed, RandomStream.SAMPLE).integers(0, self.count, self.count)
        drawn = replace(self, hashes=None)._select(rows, self.arrivals)
        return drawn if self.hashes is None else drawn._with_note("hashes are dropped: resampled")

    def with_poisson_arrivals(self, rate: float, seed: int) -> "Workload":
        """The same requests in the same order, arriving at random, `rate` per second in the mean.

        Raises: UsageError for a rate that is not above 0.
        """
        gaps = random_generator(seed, RandomStream.ARRIVALS).standard_exponential(self.count - 1)
        arrivals = np.concatenate([[0.0], np.cumsum(gaps / _check_rate(rate))])
        return replace(self, arrivals=arrivals)

    def scaled_to_rate(self, rate: float) -> "Workload":
        """The source's own times stretched or shrunk: (n - 1) / span becomes `rate` per second.

        Raises: UsageError for a rate that is not above 0, and where there are no times to scale.
        """
        wanted = (self.count - 1) / _check_rate(rate)
        if self.arrivals is None or not self.arrivals[-1] > 0:
            raise UsageError(f"{self.name} has no times that could be scaled to a rate")
        return replace(self, arrivals=self.arrivals * (wanted / float(self.arrivals[-1])))

    def with_prompt_limit(self, limit: int) -> "Workload":
        """Without the requests whose prompt is longer; a note says how many those are.

        The first that is left arrives at 0.0. Raises `UsageError` where none is left.
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
        """What it looks like, in figures."""
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
        """Requests `rows`, the first of which arrives at the first of `arrivals`."""
        return replace(
            self,
            arrivals=None if arrivals is None else arrivals[: rows.size],
            prompts=self.prompts[rows],
            outputs=self.outputs[rows],
            hashes=None if self.hashes is None else select_hashes(self.hashes, rows),
        )

    def _with_note(self, note: str) -> "Workload":
        return replace(self, notes=(*self.notes, note))


def _tokens(what: str, counts: Counts) -> Counts:
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or not counts.size:
        raise UsageError(f"{what} are integers [n], n >= 1, not {counts.dtype} {counts.shape}")
    wrong = np.flatnonzero((counts < 1) | (counts > MAX_TOKENS))
    if wrong.size:
        row = int(wrong[0])
        raise UsageError(f"request {row}: {what} are 1 to {MAX_TOKENS} tokens, not {counts[row]}")
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
    still = array.view()
    still.setflags(write=False)
    return still
