"""The process group in Python that docs/foreign-communicators.md gives to copy can be judged."""

from contextlib import closing
from pathlib import Path

import pytest

from equipoise.hal import registry
from equipoise.hal.capabilities import Operation
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.executors.processes import ProcessSubject
from equipoise.hal.conformance.search import PropertyHeld, SearchSettings, search
from equipoise.hal.errors import BackendUnavailable

FOLDER = Path(__file__).parents[3] / "examples" / "communicator_programs"
NAME = "c10d:python_groups:python"
HELD = ("every-collective-equals-its-definition", "every-dtype-and-shape-is-transported")


def test_group_in_python_is_judged_by_what_it_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    with closing(ProcessSubject("cpu", NAME, 2)) as subject:
        verdicts = [search(suite.find(name), subject, SearchSettings(cases=4)) for name in HELD]
    assert [verdict for verdict in verdicts if not isinstance(verdict, PropertyHeld)] == []
    declared = registry.communicator(NAME).capabilities
    assert Operation.ALL_REDUCE in declared.operations
    assert Operation.BROADCAST not in declared.operations


def test_unknown_backend_is_refused_with_the_name_of_a_module() -> None:
    with pytest.raises(BackendUnavailable, match="c10d:MODULE:hccl; HCCL is c10d:torch_npu:hccl"):
        registry.communicator("c10d:hccl")
