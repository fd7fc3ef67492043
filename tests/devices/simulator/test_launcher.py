"""`python -m npusim`: exit codes, one-line errors, faults."""

import sys

import pytest
from devices.simulator.simulated_program import PROGRAMS, launch, run_program
from npusim.launch import FAULTY
from npusim.process import TIMER_SLACK


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: --schedule"),
        (("--schedule", "lazy"), "no command"),
        (("--schedule", "lazy", "--"), "no command"),
        (("--schedule", "quick", "--", "true"), "no schedule is called 'quick'"),
        (("--schedule", "lazy", "--seed", "1", "--", "true"), "takes no seed"),
        (("--schedule", "lazy", "--devices", "0", "--", "true"), "--devices 0 is not in 1 to 64"),
        (("--schedule", "lazy", "--devices", "65", "--", "true"), "--devices 65 is not in 1 to 64"),
        (("--schedule", "lazy", "--memory", "1048577", "--", "true"), "is not in 1 to 1048576"),
        (("--schedule", "lazy", "--memory", "x", "--", "true"), "invalid int value"),
        (("--schedule", "lazy", "--wrong", "--", "true"), "--wrong"),
        (("--schedule", "lazy", "--", "/no/such/program"), "cannot start /no/such/program"),
    ],
)
def test_launcher_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str
) -> None:
    outcome = launch(*arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_launcher_help_names_schedules_and_exit_codes() -> None:
    outcome = launch("--help")
    assert outcome.code == 0
    for word in ("eager", "delay[:SEED]", "lazy", "explore[:SEED]", "exit codes"):
        assert word in outcome.out


def test_launcher_returns_exit_code_of_faultless_command() -> None:
    outcome = launch("--schedule", "lazy", "--", "sh", "-c", "exit 3")
    assert (outcome.code, outcome.out, outcome.err) == (3, "", "")


def test_launcher_gives_command_and_grandchildren_its_timer_slack() -> None:
    outcome = launch("--schedule", "lazy", "--", "sh", "-c", "cat /proc/self/timerslack_ns; true")
    assert outcome.out.split() == [str(TIMER_SLACK)]


@pytest.mark.parametrize("code", ["0", "3"])
def test_launcher_exits_70_when_command_had_faults(code: str) -> None:
    outcome = run_program("copy_faults", "eager", arguments=("2", code))
    assert outcome.code == FAULTY
    assert "npusim: 2 faults, 1 different" in outcome.err
    assert "2 x the target of a copy is no device memory" in outcome.err


def test_launcher_counts_faults_of_grandchildren() -> None:
    inner = f"import subprocess, sys; subprocess.run({_faulty()!r}, check=True)"
    outcome = launch("--schedule", "eager", "--", sys.executable, "-c", inner)
    assert outcome.code == FAULTY
    assert "1 faults" in outcome.err


def test_launcher_exits_70_when_fault_file_is_removed() -> None:
    outcome = launch("--schedule", "eager", "--", "sh", "-c", 'rm "$NPUSIM_FAULTS"')
    assert outcome.code == FAULTY
    assert outcome.err.splitlines() == [
        "npusim: the file of faults is lost: No such file or directory"
    ]


def test_launcher_unusable_build_folder_is_one_line() -> None:
    variables = {"NPUSIM_BUILD": "/proc/nowhere"}
    outcome = launch("--schedule", "eager", "--", "true", environment=variables)
    assert outcome.code == 2
    assert outcome.err.startswith("npusim: cannot build in /proc/nowhere: ")
    assert len(outcome.err.splitlines()) == 1


def test_launcher_keep_going_ignores_faults() -> None:
    outcome = launch("--schedule", "eager", "--keep-going", "--", *_faulty())
    assert outcome.code == 0
    assert "1 faults" in outcome.err


def test_launcher_sets_number_of_devices_and_memory() -> None:
    facts = run_program("device_size", "eager", "--devices", "3", "--memory", "64").facts
    assert facts == {"devices": 3, "total": 64 << 20}


def test_launcher_reports_call_of_unimplemented_function() -> None:
    outcome = run_program("missing_function", "eager")
    assert outcome.code == FAULTY
    assert "libascendcl: rtKernelLaunch was called and is a stub" in outcome.err
    assert outcome.out.strip() == '{"code": 200001}'


def _faulty() -> list[str]:
    return [sys.executable, str(PROGRAMS / "copy_faults.py"), "1", "0"]
