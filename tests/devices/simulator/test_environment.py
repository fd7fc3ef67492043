"""What a command under the simulator finds in its environment."""

from pathlib import Path

from npusim.launch import Settings, environment

CANN = Path("/somewhere/cann")
FAULTS = Path("/somewhere/faults")


def seen(schedule: str = "lazy", **inherited: str) -> dict[str, str]:
    """The environment of a command."""
    return environment(inherited, CANN, Settings(schedule), FAULTS)


def test_the_libraries_are_found_first_and_other_folders_stay() -> None:
    assert seen()["LD_LIBRARY_PATH"] == "/somewhere/cann/lib64"
    assert seen(LD_LIBRARY_PATH="/a:/b")["LD_LIBRARY_PATH"] == "/somewhere/cann/lib64:/a:/b"


def test_a_command_within_a_command_finds_them_once() -> None:
    once = seen(LD_LIBRARY_PATH="/a")
    assert environment(once, CANN, Settings("lazy"), FAULTS) == once


def test_a_set_variable_of_the_user_stays() -> None:
    assert seen(OMP_NUM_THREADS="4")["OMP_NUM_THREADS"] == "4"
    assert seen("explore:1", TASK_QUEUE_ENABLE="2")["TASK_QUEUE_ENABLE"] == "2"


def test_only_an_exploring_schedule_does_without_the_task_queue() -> None:
    assert seen("explore:1")["TASK_QUEUE_ENABLE"] == "0"
    assert "TASK_QUEUE_ENABLE" not in seen("lazy")


def test_the_driver_is_told_what_was_chosen() -> None:
    chosen = environment({}, CANN, Settings("delay:3", 2, 64, True), FAULTS)
    told = {name: value for name, value in chosen.items() if name.startswith("NPUSIM")}
    assert told == {
        "NPUSIM_SCHEDULE": "delay:3",
        "NPUSIM_FAULTS": "/somewhere/faults",
        "NPUSIM_DEVICES": "2",
        "NPUSIM_MEMORY": "64",
        "NPUSIM_TRACE": "1",
    }


def test_what_was_not_chosen_is_the_drivers_own_default() -> None:
    assert "NPUSIM_DEVICES" not in seen()
    assert "NPUSIM_TRACE" not in seen()
