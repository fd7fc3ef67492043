"""Synthetic workloads, with published parameters, in place of traces that are not available.

A seed draws the same requests on every machine, if numpy's `Generator` keeps its streams and the
exponential functions agree to the last bit but one: draws are rounded to tokens. Tests compare
samples. The "mean" of a lognormal is that of the distribution, not of its logarithm.
"""

from collections.abc import Callable, Mapping
from math import log
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from equipoise.balancer.requests.catalogue import WORKLOADS
from equipoise.balancer.requests.workload import (
    Counts,
    RandomStream,
    Seconds,
    Workload,
    random_generator,
)
from equipoise.hal.errors import UsageError

LengthSampler: TypeAlias = Callable[[np.random.Generator, int], tuple[Counts, Counts]]
"""Draws n prompts and outputs from a generator, int64 [n] each."""


def generate(name: str, count: int, seed: int) -> Workload:
    """Draws `count` requests of the workload `name`, a key of `WORKLOADS`, without arrival times.

    Raises UsageError for an unknown name, for less than one request, and for a bad seed.
    """
    if name not in LENGTH_SAMPLERS:
        raise UsageError(f"no workload is called {name!r}: there are {', '.join(WORKLOADS)}")
    if count < 1:
        raise UsageError(f"a workload has at least one request, not {count}")
    prompts, outputs = LENGTH_SAMPLERS[name](random_generator(seed, RandomStream.SIZES), count)
    return Workload(name, None, prompts, outputs)


def prop(generator: np.random.Generator, count: int) -> tuple[Counts, Counts]:
    """Bivariate normal, prompts (3200, 2600), outputs (1200, 700), correlation -0.1, both > 0.

    The parameters are those of the BF-IO simulator's default (arXiv 2601.17855), which model a
    proprietary trace. They are those of the normal before truncation; the result has means of
    about 3730 and 1254, standard deviations of 2166 and 634, and a correlation of -0.075.
    """
    accepted_pairs = np.zeros((0, 2))
    while len(accepted_pairs) < count:
        first, second = generator.standard_normal((2, count))
        correlated_draws = -0.1 * first + (1 - 0.1**2) ** 0.5 * second
        pairs = np.stack([3200 + 2600 * first, 1200 + 700 * correlated_draws], axis=1)
        accepted_pairs = np.concatenate([accepted_pairs, pairs[(pairs > 0).all(axis=1)]])
    return _tokens(accepted_pairs[:count, 0]), _tokens(accepted_pairs[:count, 1])


def az24(generator: np.random.Generator, count: int) -> tuple[Counts, Counts]:
    """Prompts lognormal, mean 4652, sigma 0.8; outputs 1001 + Exp(51).

    After Azure's conversations of 2024 as BalanceRoute (arXiv 2605.06113) filtered them: outputs
    over 1000, with means of 4652 and 1052. The spread of prompts was not published.
    """
    prompts = _lognormal(generator, 4652, 0.8, count)
    return _tokens(prompts), _tokens(1001 + 51 * generator.standard_exponential(count))


def reason(generator: np.random.Generator, count: int) -> tuple[Counts, Counts]:
    """Prompts lognormal, mean 803, sigma 1; outputs lognormal, mean 3653, sigma 1, 8 to 32768.

    The means are those of TensorRT-LLM's blog 10. Clipping takes the mean of outputs to 3604.
    """
    prompts = _lognormal(generator, 803, 1.0, count)
    return _tokens(prompts), _tokens(_lognormal(generator, 3653, 1.0, count), 8, 32768)


def sharegpt(generator: np.random.Generator, count: int) -> tuple[Counts, Counts]:
    """Prompts lognormal, mean 161, sigma 1; outputs lognormal, mean 338, sigma 0.8; 4 to 1024 both.

    The means are those that the vLLM paper gives for ShareGPT; outputs are capped as in
    DP-BalanceRouter's benchmark, prompts as in vLLM's, which also leaves out what is below 4.
    Spreads were not published, and are those of other chats: BurstGPT's requests have both mean /
    median = 363 / 217 and p95 / median = 1144 / 217 of a sigma of 1.0; the answers in Azure's
    conversations of 2023 have p95 / median = 451 / 129 of a sigma of 0.76, and mean / median =
    211 / 129 of 0.99, most of it in a tail that the cap takes off. Clipping takes the means to 156
    and 321.
    """
    prompts = _lognormal(generator, 161, 1.0, count)
    outputs = _lognormal(generator, 338, 0.8, count)
    return _tokens(prompts, 4, 1024), _tokens(outputs, 4, 1024)


LENGTH_SAMPLERS: Mapping[str, LengthSampler] = MappingProxyType(
    {"prop": prop, "az24": az24, "reason": reason, "sharegpt": sharegpt}
)


def _lognormal(generator: np.random.Generator, mean: float, sigma: float, count: int) -> Seconds:
    return np.exp(log(mean) - sigma**2 / 2 + sigma * generator.standard_normal(count))


def _tokens(values: Seconds, least: int = 1, most: int | None = None) -> Counts:
    clipped = np.clip(np.rint(values), least, most)
    return clipped.astype(np.int64)
