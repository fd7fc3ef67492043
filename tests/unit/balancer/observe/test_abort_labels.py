"""Abort reasons as labels: a closed set, which covers every reason in the code."""

import ast
from pathlib import Path

import pytest

import equipoise.balancer.experts as experts
from equipoise.balancer.observe.metrics import ABORT_LABELS, OTHER_LABEL, abort_label

FOLDER = Path(experts.__file__).parent
REASON_ARGUMENT = {"Abort": 0, "Failed": 1, "_decline": 2}
"""Calls that take a reason, and the position of that argument."""


def reasons_in_code() -> set[str]:
    """Finds every reason in the engine's code; of an f-string, its constant beginning."""
    reasons = set()
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                position = REASON_ARGUMENT.get(name)
                if position is not None and len(node.args) > position:
                    reasons |= constant_beginning(node.args[position])
    return reasons


def constant_beginning(node: ast.expr) -> set[str]:
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def test_label_of_every_engine_reason_is_unique() -> None:
    reasons = reasons_in_code()
    assert len(reasons) >= 8
    labels = {reason: abort_label(reason) for reason in reasons}
    assert OTHER_LABEL not in labels.values(), labels
    assert len(set(labels.values())) == len(reasons)


def test_label_of_reason_ignores_rank_numbers() -> None:
    assert abort_label("no ballot from rank(s) 1") == abort_label("no ballot from rank(s) 2, 70")


@pytest.mark.parametrize("reason", ["", "the moon", "plan", "aborted by a newer version"])
def test_label_of_unknown_reason_is_other(reason: str) -> None:
    assert abort_label(reason) == OTHER_LABEL
    assert OTHER_LABEL in ABORT_LABELS
