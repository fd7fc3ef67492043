"""No two types of the native core have one name: their members would be mixed up in linking."""

import re
from collections import defaultdict

from helpers.paths import ROOT

CSRC = ROOT / "csrc"
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{", re.MULTILINE)
TYPE = re.compile(r"^(?:enum )?(?:class|struct) (\w+)\b[^;]*\{", re.MULTILINE)


def defined() -> dict[str, set[str]]:
    """Headers by the types that they define, namespace and all."""
    found = defaultdict(set)
    for header in sorted(CSRC.rglob("*.h")):
        text = header.read_text(encoding="utf-8")
        (namespace,) = set(NAMESPACE.findall(text))
        for name in TYPE.findall(text):
            found[f"{namespace}::{name}"].add(str(header.relative_to(CSRC)))
    return found


def test_native_types_are_defined_in_one_header() -> None:
    # A worker of the engine and one of the routers were both equipoise::Worker.
    types = defined()
    assert {"equipoise::LayerPlanner", "equipoise::requests::Worker"} <= set(types)
    assert {name: where for name, where in types.items() if len(where) > 1} == {}
