"""What a library offers is learnt on a group of one rank."""

from typing import Any

import torch

from equipoise.backends.common.library_trial import DTYPES, try_library
from equipoise.hal.capabilities import Operation


class EndedWork:
    """A work that has ended well."""

    def result(self, timeout: float) -> None:
        assert timeout > 0


class Alone:
    """A communicator of one rank that offers little, and is spoilt by a refusal."""

    def __init__(self, aborts: bool = True) -> None:
        self.spoilt = False
        self._aborts = aborts

    def __getattr__(self, name: str) -> Any:
        return lambda *tensors: self._call(name, tensors)

    def _call(self, name: str, tensors: tuple[Any, ...]) -> EndedWork:
        if name == "all_gather" or (tensors and tensors[0].dtype == torch.int16):
            self.spoilt = True
        if self.spoilt:
            raise RuntimeError(f"{name} is not supported")
        return EndedWork()

    def abort(self) -> None:
        self.spoilt = self._aborts

    def close(self) -> None:
        raise RuntimeError("cannot be closed")


def test_trial_declares_what_one_rank_can_do() -> None:
    trial = try_library("cpu", lambda _: Alone())
    assert trial.absent.keys() == {Operation.ALL_GATHER, Operation.CANCEL}
    assert trial.absent[Operation.ALL_GATHER] == "all_gather is not supported"
    assert trial.dtypes == trial.reductions == frozenset(DTYPES) - {torch.int16}
    assert Operation.POINT_TO_POINT in trial.capabilities.operations


def test_trial_goes_on_with_a_new_group_after_a_failure() -> None:
    opened: list[int] = []

    def open_alone(number: int) -> Alone:
        opened.append(number)
        return Alone()

    try_library("cpu", open_alone)
    # one for each dtype of all_gather, one for int16 of each other operation, one after the abort
    assert len(opened) == 1 + len(DTYPES) + 5 + 1
    assert opened == sorted(set(opened))


def test_abort_counts_if_it_ends_the_group() -> None:
    assert try_library("cpu", lambda _: Alone()).abort
    idle = try_library("cpu", lambda _: Alone(aborts=False))
    assert not idle.abort


def test_device_decides_what_is_promised() -> None:
    trial = try_library("cpu", lambda _: Alone())
    declared = trial.capabilities
    assert (declared.stream_ordered, declared.independent_groups) == (False, True)
