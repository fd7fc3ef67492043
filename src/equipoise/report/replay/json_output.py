"""The figures of `equipoise replay` as plain values."""

from typing import Any

from equipoise import __version__
from equipoise.report.placement.spread import Reals
from equipoise.report.replay.decision import decide
from equipoise.report.replay.replay import Outcome, Replay
from equipoise.report.replay.table import headline
from equipoise.report.text import json_float


def to_json(replay: Replay) -> dict[str, Any]:
    """Every figure of the table, and imbalance and time step by step; null where unknown."""
    decision = decide(replay)
    inputs = replay.inputs
    return {
        "equipoise": __version__,
        "decision": headline(replay, decision),
        "best": None if decision.best is None else decision.best.name,
        "best_slots": None if decision.best is None else decision.best.slots,
        "ranks": inputs.ranks,
        "nodes": inputs.nodes,
        "experts": inputs.source.experts,
        "layers": list(inputs.source.layers),
        "steps": replay.steps,
        "rows": replay.rows,
        "price": replay.price,
        "unit": _unit(replay),
        "outcomes": [_outcome(replay, one) for one in replay.outcomes],
        "refusals": [vars(one) for one in replay.refusals],
    }


def _unit(replay: Replay) -> str:
    if replay.steps_in_seconds:
        return "seconds of a step"
    if replay.times_in_seconds:
        return "seconds of the experts of a step"
    return "steps without a balancer"


def _outcome(replay: Replay, one: Outcome) -> dict[str, Any]:
    cadence = one.cadence
    return {
        "name": one.name,
        "engine": one.engine,
        "slots": one.slots,
        "window": None if cadence is None else cadence.window,
        "interval": None if cadence is None else cadence.interval,
        "imbalance": json_float(one.mean_imbalance),
        "imbalance_p95": json_float(one.high_imbalance),
        "imbalance_standard_error": one.standard_error,
        "time": json_float(one.mean_seconds),
        "paused_seconds": None if replay.inputs.transfers is None else one.pauses,
        "link_share": one.link_share(replay.steps_in_seconds),
        "copies": one.copies,
        "batch": one.batch,
        "kv_tokens": one.kv_tokens,
        "weight_bytes": one.weight_bytes,
        "gain": json_float(replay.gain(one)),
        "rebalances": [vars(move) for move in one.rebalances],
        "layer_imbalance": _floats(one.layer_imbalance),
        "steps": one.steps.tolist(),
        "step_imbalance": _floats(one.imbalance),
        "step_time": _floats(one.seconds),
    }


def _floats(values: Reals) -> list[float | None]:
    return [json_float(value) for value in values.tolist()]
