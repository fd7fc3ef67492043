"""A step: its rows, and how long its experts take."""

from equipoise.balancer.formats.arrangement import Arrangement
from equipoise.report.advice.question import Question
from equipoise.report.advice.trial import Trial
from equipoise.report.spread import Reals


def step_rows(question: Question, trial: Trial) -> int:
    """Rows of a layer in a step, over all ranks: as said, or those of a window."""
    return question.step_rows or trial.rows


def layer_seconds(question: Question, trial: Trial, layout: Arrangement) -> Reals | None:
    """(layers,): seconds of a step on the slowest rank; None without hardware and an expert."""
    if question.roofline is None:
        return None
    return question.roofline.layers(trial.test, layout, step_rows(question, trial) / trial.rows)


def step_seconds(question: Question, trial: Trial, layout: Arrangement) -> float | None:
    """Of all layers."""
    found = layer_seconds(question, trial, layout)
    return None if found is None else float(found.sum())
