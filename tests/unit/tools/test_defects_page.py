"""The tests and properties that docs/design/defects.md names exist."""

import ast
import re

import pytest
from helpers.paths import ROOT

PAGE = (ROOT / "docs" / "design" / "defects.md").read_text(encoding="utf-8")
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NAMED_PROPERTY = re.compile(r"property `([a-z0-9-]+)`")


@pytest.mark.slow
def test_defects_page_names_tests_that_exist() -> None:
    tests = NAMED_TEST.findall(PAGE)
    assert len(tests) > 50
    for path, name in tests:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = ast.FunctionDef | ast.AsyncFunctionDef
        names = {node.name for node in ast.walk(tree) if isinstance(node, functions)}
        assert name in names, f"{path} has no {name}"


def test_defects_page_names_properties_that_exist() -> None:
    properties = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "hal" / "conformance" / "properties").glob("*.py")
    )
    names = NAMED_PROPERTY.findall(PAGE)
    assert names != []
    assert [name for name in names if f'name="{name}"' not in properties] == []
