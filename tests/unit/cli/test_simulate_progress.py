"""Progress of many runs, on a terminal and in a log."""

import io

from hypothesis import given
from hypothesis import strategies as st

from equipoise.cli.progress import (
    LINES,
    NoSimulationProgress,
    SimulationProgressBar,
    SimulationProgressLines,
    simulation_progress_for,
)


@given(runs=st.integers(1, 200))
def test_simulate_progress_log_is_bounded_and_ends_with_last_run(runs: int) -> None:
    stream = io.StringIO()
    lines = SimulationProgressLines(runs, stream)
    for _ in range(runs):
        lines.update("fit", 0, 0.5)
        lines.finish_run()
    lines.close()
    log_lines = stream.getvalue().splitlines()
    assert 1 <= len(log_lines) <= LINES
    assert log_lines[-1] == f"{runs}/{runs} runs"


def test_simulate_progress_bar_names_policy_seed_and_runs() -> None:
    stream = io.StringIO()
    bar = SimulationProgressBar(2, stream)
    bar.update("fit", 3, 0.5)
    bar.finish_run()
    bar.update("fit", 4, 2.0)
    bar.finish_run()
    bar.close()
    assert "fit, seed 4" in stream.getvalue()
    assert "2/2 runs" in stream.getvalue()


def test_hidden_simulate_progress_accepts_all_calls() -> None:
    hidden = simulation_progress_for("hidden", 3)
    assert isinstance(hidden, NoSimulationProgress)
    hidden.update("fit", 0, 0.1)
    hidden.finish_run()
    hidden.close()
