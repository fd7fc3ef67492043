"""What advice rests on, spelt out for the reader."""

from collections.abc import Iterator
from textwrap import fill

from equipoise.report.advice.advice import Advice
from equipoise.report.advice.question import Question
from equipoise.report.advice.step import step_rows
from equipoise.report.forecast_table import volume

WIDTH = 80


def basis(advice: Advice) -> Iterator[str]:
    """Lines of a name and what it is."""
    question, trial = advice.question, advice.trial
    yield _line("load", _load(advice))
    said = "as said" if question.step_rows else "a window is taken for a step"
    yield _line("step", f"{step_rows(question, trial):,} rows of a layer, {said}")
    runs = "experts in their order, one copy each" if question.installed is None else "installed"
    yield _line("now", runs)
    yield _line("target", f"imbalance {question.target:g} on the rows planned on")
    yield _line("expert", _expert(question))
    yield _line("hardware", _hardware(question))
    yield _line("latency", _latency(question))


def _load(advice: Advice) -> str:
    trial = advice.trial
    windows = advice.question.statistics.windows
    rows = f"{trial.rows:,} rows of a layer each"
    if not trial.held_out:
        return f"one window, {rows}: measured on what was planned on"
    planned, measured = trial.train.windows, trial.test.windows
    return f"{windows} windows, {rows}: planned on {planned}, measured on {measured} later"


def _expert(question: Question) -> str:
    if question.expert is None:
        return "unknown; --expert-bytes, or --hidden and --intermediate"
    operations = question.expert.operations_per_row
    return (
        f"{volume(question.expert.size)} in {question.expert.precision}, "
        f"{operations / 1e6:,.1f} million operations a row"
    )


def _hardware(question: Question) -> str:
    if question.hardware is None:
        return "unknown; --hardware"
    found = question.hardware.figures
    figures = ", ".join(f"{key} {value:g}" for key, value in found.items())
    return f"{question.hardware.name}: {figures}; --json has the source of each"


def _latency(question: Question) -> str:
    if question.latency is None:
        return "unknown; --itl"
    shares = f"experts may take {question.moe_share:.0%} of it"
    memory = f"{question.memory_share:.0%} of memory"
    link = f"weights come over the {question.link} link"
    return f"{question.latency * 1e3:g} ms; {shares} and {memory}; {link}"


def _line(name: str, text: str) -> str:
    return fill(text, WIDTH, initial_indent=f"  {name:<10}", subsequent_indent=" " * 12)
