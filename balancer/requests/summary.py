"""What a workload looks like, in a few figures."""

from dataclasses import dataclass

import numpy as np

from equipoise.balancer.requests.block_hashes import Counts, Hashes


@dataclass(frozen=True)
class Lengths:
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
    def of(counts: Counts) -> "Lengths":
        """Of int64 [n], n >= 1."""
        half, high = np.percentile(counts, [50, 95])
        return Lengths(float(counts.mean()), float(half), float(high), int(counts.max()))


@dataclass(frozen=True)
class Summary:
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
    prompts: Lengths
    outputs: Lengths
    correlation: float | None
    reuse: float | None


def correlation(prompts: Counts, outputs: Counts) -> float | None:
    """Pearson's; None where one of them is constant."""
    if np.ptp(prompts) == 0 or np.ptp(outputs) == 0:
        return None
    return float(np.corrcoef(prompts, outputs)[0, 1])


def reuse(hashes: Hashes | None) -> float | None:
    """The part of the ids that another one of the same value comes before."""
    if hashes is None or not hashes[0].size:
        return None
    return float(1 - np.unique(hashes[0]).size / hashes[0].size)
