"""The suite and the contract have the same clauses."""

import re

from helpers.paths import ROOT

from equipoise.hal.conformance import suite
from equipoise.hal.conformance.clauses import LEVELS, TITLES, clause_sort_key

CONTRACT = ROOT / "docs" / "contract.md"
KEPT_ELSEWHERE = {"A9", "B3", "B9", "D2", "E6", "G7", "G9", "P5"}
"""Clauses that bind the balancer, the pipeline, the registry or the launcher, not a backend."""

REPORTED = {"T1"}
"""Measured, not judged."""


def contract() -> list[str]:
    text = CONTRACT.read_text(encoding="utf-8")
    return re.findall(r"^\| ([A-Z]\d+) \|", text, re.MULTILINE)


def test_clause_titles_match_contract_order() -> None:
    assert list(TITLES) == contract()
    assert sorted(TITLES, key=clause_sort_key) == contract()


def test_clause_titles_fit_on_a_line() -> None:
    assert max(map(len, TITLES.values())) <= 63


def test_every_clause_has_a_property_or_is_exempt() -> None:
    assert set(suite.clauses()) | KEPT_ELSEWHERE == set(contract())
    assert set(suite.clauses()) & KEPT_ELSEWHERE == set()


def test_contract_names_level_of_each_clause() -> None:
    text = CONTRACT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z]\d+) \| .+? \| .+? \| (.*?) ?\| ", text, re.MULTILINE)
    assert dict(rows) == {clause: LEVELS.get(clause, "") for clause in TITLES}


def test_each_judged_clause_has_property_of_its_level() -> None:
    """So that the properties of a level are all that it needs."""
    judged_in_level = {
        clause
        for prop in suite.properties()
        for clause in prop.clauses
        if LEVELS.get(prop.clauses[0]) == LEVELS.get(clause)
    }
    assert judged_in_level == set(suite.clauses())
    assert set(LEVELS) == set(suite.clauses()) - REPORTED


def test_property_names_are_unique() -> None:
    names = [prop.name for prop in suite.properties()]
    assert len(set(names)) == len(names)


def test_contract_names_property_families_of_each_clause() -> None:
    text = CONTRACT.read_text(encoding="utf-8")
    for clause, test_column in re.findall(r"^\| ([A-Z]\d+) \|.*\| ([^|]*) \|$", text, re.MULTILINE):
        families = [prop.family for prop in suite.properties() if clause in prop.clauses]
        match = re.search(r"conformance \(([^)]*)\)", test_column)
        assert (match[1].split(", ") if match else []) == list(dict.fromkeys(families)), clause
