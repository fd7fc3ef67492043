"""Clause E6: the tree drawn at the top of the file is the tree of the classes."""

import inspect
import re

import pytest

from equipoise.hal import errors

LINE = re.compile(
    r"^(?P<lead>(?:│   |    )*(?:├── |└── )?)(?P<name>[A-Z]\w+)(?:  +(?P<words>.+))?$"
)


def docstring_tree() -> dict[str, str]:
    """The parent of each class of the tree in the docstring ("" for the root)."""
    parents: dict[str, str] = {}
    branch: list[str] = []
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        if match := LINE.match(line):
            depth = len(match["lead"]) // 4
            branch = [*branch[:depth], match["name"]]
            parents[match["name"]] = branch[depth - 1] if depth else ""
    return parents


def classes() -> dict[str, type]:
    return {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}


def test_error_tree_drawing_lists_every_class() -> None:
    assert set(docstring_tree()) == set(classes())
    assert len(docstring_tree()) > 15


def test_error_classes_have_drawn_parents() -> None:
    for name, parent in docstring_tree().items():
        assert classes()[name].__bases__ == (classes()[parent] if parent else Exception,)


def test_error_branches_are_disjoint() -> None:
    branches = [
        classes()[name] for name, parent in docstring_tree().items() if parent == "EquipoiseError"
    ]
    for kind in classes().values():
        assert sum(issubclass(kind, branch) for branch in branches) <= 1


def test_operation_timeout_is_failure_but_result_pending_is_not() -> None:
    assert issubclass(errors.OperationTimeout, errors.CommunicatorFailed)
    assert not issubclass(errors.ResultPending, errors.CommunicatorFailed)


def test_rank_errors_name_their_ranks() -> None:
    missing = errors.BallotIncomplete("q", (1, 3))
    error = errors.RankLost(2, "was killed by SIGKILL", "step 7")
    assert missing.missing == (1, 3)
    assert (error.rank, error.reason, error.operation) == (2, "was killed by SIGKILL", "step 7")
    assert str(error) == "rank 2 was killed by SIGKILL during step 7"


@pytest.mark.parametrize("kind", classes().values())
def test_error_classes_have_docstrings(kind: type) -> None:
    assert (kind.__doc__ or "").strip()
