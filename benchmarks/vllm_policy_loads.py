"""Traffic that placement policies are compared on: windows of expert loads, one after the other.

*Steady* windows are fresh samples of one popularity, log-normal, a million tokens a layer; with
*drift* every expert's popularity wanders by so much from window to window. *Generated* windows are
those of `loads.py`, every fourth of another domain; *recorded* ones are steps of the shipped model
on three kinds of text.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from loads import Counts, Model, windows
from recorded import record

from equipoise.balancer.experts.placement import Shape

TOKENS = 1_000_000
SIGMA = 1.0
STEPS, PHASE = 8, 40
"""Steps of a recorded window, and of a kind of text."""


@dataclass(frozen=True)
class Traffic:
    """What is compared.

    Attributes:
        name: in tables.
        shape: it is placed in.
        sigma: of the logarithm of an expert's popularity.
        drift: of it, from window to window.
        tokens: of a layer and window.
    """

    name: str
    shape: Shape
    sigma: float = SIGMA
    drift: float = 0.0
    tokens: int = TOKENS


@dataclass(frozen=True)
class Window:
    """Load int64 (layers, experts), and whether the traffic is another than before."""

    load: Counts
    switched: bool = False


def sampled(traffic: Traffic, seed: int, count: int) -> Iterator[Window]:
    """Steady windows, or such with drift."""
    rng = np.random.default_rng(seed)
    shape = traffic.shape
    logarithm = traffic.sigma * rng.standard_normal((shape.layers, shape.experts))
    for _ in range(count):
        popularity = np.exp(logarithm)
        odds = popularity / popularity.sum(axis=1, keepdims=True)
        yield Window(np.stack([rng.multinomial(traffic.tokens, row) for row in odds]))
        logarithm = logarithm + traffic.drift * rng.standard_normal(logarithm.shape)


def generated(shape: Shape, seed: int, count: int) -> Iterator[Window]:
    """Windows of the generator, fitted to published figures."""
    model = Model(layers=shape.layers, experts=shape.experts, ranks=shape.ranks)
    for window in windows(model, seed, count):
        yield Window(window.load, window.switched)


def recorded(seed: int) -> Iterator[Window]:
    """Windows of the shipped model's routing; the first of a kind of text is a switch."""
    found = record(seed, 3 * PHASE)
    rows = found.rows()
    for first in range(0, len(rows), STEPS):
        yield Window(rows[first : first + STEPS].sum(axis=0), first in found.switches)
