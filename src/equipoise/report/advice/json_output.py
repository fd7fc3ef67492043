"""Advice as plain values, for JSON."""

from dataclasses import asdict
from typing import Any

from equipoise import __version__
from equipoise.report.advice.advice import Advice, MigrationAdvice
from equipoise.report.advice.inputs import AdviceInputs, step_rows
from equipoise.report.advice.migration_cost import break_even
from equipoise.report.advice.sizing import SlotChoice
from equipoise.report.advice.worth import ServingOption, Worth
from equipoise.report.placement.spread import mean_known
from equipoise.report.text import json_float


def to_json(advice: Advice) -> dict[str, Any]:
    """Everything in the table and, of the options, every layer; null where something is unknown."""
    return {
        "equipoise": __version__,
        "kind": "a model, not a measurement",
        "decision": {
            "action": advice.decision.action.name.lower(),
            "sentence": advice.decision.sentence,
        },
        "inputs": _question(advice),
        "slots": advice.slots,
        "worth": _worth(advice.worth),
        "slot_choices": {
            "choices": [_slot_choice(one) for one in advice.slot_choices.choices],
            "advised_slots": advice.slot_choices.advised.slots,
            "reason": advice.slot_choices.reason.name.lower(),
            "layers_that_gain": advice.slot_choices.layers_that_gain,
        },
        "rank_choices": {
            "choices": [_plain(asdict(one)) for one in advice.rank_choices.choices],
            "advised_ranks": advice.rank_choices.advised and advice.rank_choices.advised.ranks,
            "judged_by": advice.rank_choices.judged_by,
        },
        "migration": advice.migration and _migration(advice.migration),
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
        "current": "linear" if question.installed is None else "installed",
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
        "kv_cache": question.kv_cache and asdict(question.kv_cache),
        "kv_usage": question.kv_usage,
        "dead_zone": asdict(question.zone),
    }


def _worth(worth: Worth) -> dict[str, Any]:
    return {
        "verdict": worth.verdict.name.lower(),
        "throughput_gain": json_float(worth.gain),
        "running_requests": worth.running,
        "cadence": worth.cadence.name.lower(),
        "noise_floor_of_window": worth.floor,
        "noise_floor_of_step": worth.step_floor,
        "few_rows_of_expert": worth.few_rows,
        "options": [_option(option) for option in worth.options],
    }


def _option(option: ServingOption) -> dict[str, Any]:
    return {
        "name": option.name,
        "planned": None if option.planned is None else json_float(option.planned),
        "measured": json_float(option.mean),
        "worst": json_float(option.worst),
        "step": json_float(option.step),
        "seconds": option.seconds,
        "by_layer": [json_float(float(value)) for value in option.measured],
    }


def _slot_choice(choice: SlotChoice) -> dict[str, Any]:
    by_layer = [json_float(float(value)) for value in choice.measured]
    mean = mean_known(choice.measured)
    return _plain(asdict(choice) | {"measured": mean}) | {"by_layer": by_layer}


def _migration(migration: MigrationAdvice) -> dict[str, Any]:
    plan = migration.moves[0]
    return {
        **asdict(migration.pace),
        "experts_per_step": migration.pace.experts_per_step,
        "moves": [
            asdict(one) | {"seconds": one.steps * migration.pace.latency} for one in migration.moves
        ],
        "saved_seconds_per_step": migration.saved,
        "break_even_steps": {
            "paused": break_even(plan.bulk_stall, migration.saved),
            "by_layer": break_even(plan.layer_stall, migration.saved),
        },
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: json_float(v) if isinstance(v, float) else v for k, v in values.items()}
