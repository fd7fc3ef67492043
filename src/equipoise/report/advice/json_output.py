"""Advice as plain values, for JSON."""

from dataclasses import asdict
from typing import Any

from equipoise import __version__
from equipoise.report.advice.advice import Advice, MigrationAdvice
from equipoise.report.advice.inputs import AdviceInputs, step_rows
from equipoise.report.advice.migration_cost import break_even
from equipoise.report.advice.worth import ServingOption, Worth
from equipoise.report.placement.forecast import json_float


def to_json(advice: Advice) -> dict[str, Any]:
    """Everything in the table and, of the ways, every layer; null where something is unknown."""
    return {
        "equipoise": __version__,
        "kind": "a model, not a measurement",
        "rests_on": _question(advice),
        "slots": advice.slots,
        "worth": _worth(advice.worth),
        "redundancy": {
            "choices": [_plain(asdict(one)) for one in advice.redundancy.choices],
            "advised_slots": advice.redundancy.advised.slots,
            "reason": advice.redundancy.reason.name.lower(),
        },
        "widths": {
            "choices": [_plain(asdict(one)) for one in advice.widths.choices],
            "advised_ranks": advice.widths.advised and advice.widths.advised.ranks,
            "judged_by": advice.widths.judged_by,
        },
        "movement": advice.movement and _movement(advice.movement),
    }


def _question(advice: Advice) -> dict[str, Any]:
    question, split = advice.question, advice.split
    return {
        "windows": question.statistics.windows,
        "windows_planned_on": split.train.windows,
        "windows_measured_on": split.test.windows,
        "held_out": split.held_out,
        "layers": list(question.statistics.layers),
        "experts": question.statistics.experts,
        "ranks": question.ranks,
        "now": "linear" if question.installed is None else "installed",
        "target": question.target,
        "rows_of_window": split.rows,
        "rows_of_step": step_rows(question, split),
        **_machine(question),
    }


def _machine(question: AdviceInputs) -> dict[str, Any]:
    expert, hardware = question.expert, question.hardware
    return {
        "expert": expert and asdict(expert) | {"operations_per_row": expert.operations_per_row},
        "hardware": hardware and asdict(hardware),
        "link": question.link,
        "latency_seconds": question.latency,
        "memory_share": question.memory_share,
        "moe_share": question.moe_share,
    }


def _worth(worth: Worth) -> dict[str, Any]:
    return {
        "verdict": worth.verdict.name.lower(),
        "gain_in_rows": json_float(worth.gain),
        "noise_floor_of_window": worth.floor,
        "noise_floor_of_step": worth.step_floor,
        "few_rows_of_expert": worth.few_rows,
        "ways": [_way(way) for way in worth.options],
    }


def _way(way: ServingOption) -> dict[str, Any]:
    return {
        "name": way.name,
        "planned": None if way.planned is None else json_float(way.planned),
        "measured": json_float(way.mean),
        "worst": json_float(way.worst),
        "seconds": way.seconds,
        "by_layer": [json_float(float(value)) for value in way.measured],
    }


def _movement(found: MigrationAdvice) -> dict[str, Any]:
    plan = found.moves[0]
    return {
        **asdict(found.pace),
        "experts_per_step": found.pace.experts_per_step,
        "moves": [asdict(one) | {"seconds": one.steps * found.pace.latency} for one in found.moves],
        "saved_seconds_per_step": found.saved,
        "break_even_steps": {
            "paused": break_even(plan.bulk_stall, found.saved),
            "by_layer": break_even(plan.layer_stall, found.saved),
        },
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: json_float(v) if isinstance(v, float) else v for k, v in values.items()}
