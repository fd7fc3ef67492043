"""The planners that are compared: ours, and public rules in our own words."""

from collections.abc import Callable

import numpy as np
import rules
from loads import Counts
from shapes import Shape

from equipoise import _native
from equipoise.balancer.experts import plan
from equipoise.balancer.experts.layout import Layout, even_shares
from equipoise.balancer.experts.placement import Placement

MOST_RANKS = 128
"""Beyond so many, the swift-like rule takes minutes."""
Planner = Callable[[Counts, Layout | None], Layout]


def left_out(shape: Shape) -> dict[str, str]:
    """Rules that are not run on a shape, and why."""
    found = {}
    if shape.ranks > MOST_RANKS:
        found["swift-like"] = "it takes two seconds a layer there"
    whole = shape.slots % shape.nodes == 0 and shape.experts % shape.groups == 0
    if shape.nodes < 2:
        found["hierarchical"] = "there is one node"
    elif shape.groups < shape.nodes or not whole:
        found["hierarchical"] = f"{shape.groups} groups do not fit {shape.nodes} nodes"
    return found


def planners(shape: Shape) -> dict[str, Planner]:
    """By name; each is given the load and what is installed."""
    slots, ranks = shape.slots, shape.ranks
    found: dict[str, Planner] = {
        "greedy": lambda load, _: _even(shape, _native.plan_greedy(load, slots, ranks)),
        "snake": lambda load, _: _by_layer(shape, lambda row: rules.snake(row, slots, ranks), load),
        "swift-like": lambda load, installed: _swift(shape, load, installed),
        "connected": lambda load, _: _ours(shape, "connected", load, None),
        "incremental": lambda load, installed: _ours(shape, "incremental", load, installed),
        "hierarchical": lambda load, _: _by_layer(
            shape,
            lambda row: rules.hierarchical(row, slots, ranks, shape.nodes, shape.groups),
            load,
        ),
    }
    return {name: found[name] for name in found if name not in left_out(shape)}


def _even(shape: Shape, placement: Placement) -> Layout:
    return Layout(placement, even_shares(placement, shape.experts))


def _by_layer(shape: Shape, rule: Callable[[Counts], Placement], load: Counts) -> Layout:
    return _even(shape, np.stack([rule(row) for row in load]))


def _ours(shape: Shape, policy: str, load: Counts, installed: Layout | None) -> Layout:
    before = None if installed is None else installed.placement
    found = plan(load, slots=shape.slots, ranks=shape.ranks, installed=before, policy=policy)
    return Layout(found.placement, found.shares)


def _swift(shape: Shape, load: Counts, installed: Layout | None) -> Layout:
    if installed is None:
        return _even(shape, _native.plan_greedy(load, shape.slots, shape.ranks))
    pairs = zip(load, installed.placement, strict=True)
    return _even(shape, np.stack([rules.swift(row, held, shape.ranks) for row, held in pairs]))
