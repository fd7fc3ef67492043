"""What a command under the simulator finds in its environment."""

from pathlib import Path

from npusim.launch import Settings, environment

CANN = Path("/somewhere/cann")
FAULTS = Path("/somewhere/faults")


def command_environment(schedule: str = "lazy", **inherited: str) -> dict[str, str]:
    """The environment of a command."""
    return environment(inherited, CANN, Settings(schedule), FAULTS)


def test_environment_puts_simulator_libraries_first() -> None:
    assert command_environment()["LD_LIBRARY_PATH"] == "/somewhere/cann/lib64"
    assert (
        command_environment(LD_LIBRARY_PATH="/a:/b")["LD_LIBRARY_PATH"]
        == "/somewhere/cann/lib64:/a:/b"
    )


def test_environment_adds_libraries_once_when_nested() -> None:
    once = command_environment(LD_LIBRARY_PATH="/a")
    assert environment(once, CANN, Settings("lazy"), FAULTS) == once


def test_environment_keeps_variables_of_the_user() -> None:
    assert command_environment(OMP_NUM_THREADS="4")["OMP_NUM_THREADS"] == "4"
    assert command_environment("explore:1", TASK_QUEUE_ENABLE="2")["TASK_QUEUE_ENABLE"] == "2"


def test_environment_disables_task_queue_only_for_explore() -> None:
    assert command_environment("explore:1")["TASK_QUEUE_ENABLE"] == "0"
    assert "TASK_QUEUE_ENABLE" not in command_environment("lazy")


def test_environment_passes_settings_to_driver() -> None:
    variables = environment({}, CANN, Settings("delay:3", 2, 64, True), FAULTS)
    settings = {name: value for name, value in variables.items() if name.startswith("NPUSIM")}
    assert settings == {
        "NPUSIM_SCHEDULE": "delay:3",
        "NPUSIM_FAULTS": "/somewhere/faults",
        "NPUSIM_DEVICES": "2",
        "NPUSIM_MEMORY": "64",
        "NPUSIM_TRACE": "1",
    }


def test_environment_omits_settings_left_at_default() -> None:
    assert "NPUSIM_DEVICES" not in command_environment()
    assert "NPUSIM_TRACE" not in command_environment()
