"""No two types of the native core have one name: their members would be mixed up in linking."""

import re
from collections import defaultdict

from helpers.paths import ROOT

CSRC = ROOT / "csrc"
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{", re.MULTILINE)
TYPE = re.compile(r"^(?:enum )?(?:class|struct) (\w+)\b[^;]*\{", re.MULTILINE)


def type_definitions() -> dict[str, set[str]]:
    """Headers by the types that they define, namespace and all."""
    headers_by_type = defaultdict(set)
    for header in sorted(CSRC.rglob("*.h")):
        text = header.read_text(encoding="utf-8")
        (namespace,) = set(NAMESPACE.findall(text))
        for name in TYPE.findall(text):
            headers_by_type[f"{namespace}::{name}"].add(str(header.relative_to(CSRC)))
    return headers_by_type


def test_native_types_are_defined_in_one_header() -> None:
    # A worker of the engine and one of the routers were both equipoise::Worker.
    types = type_definitions()
    assert {"equipoise::LayerPlanner", "equipoise::requests::Worker"} <= set(types)
    assert {name: where for name, where in types.items() if len(where) > 1} == {}
