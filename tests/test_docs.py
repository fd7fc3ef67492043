"""The documents agree with the tree: clauses, paths, pages and links."""

import re
from collections import Counter
from pathlib import Path

import house_rules
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = ROOT / "docs" / "contract.md"
FAMILIES = "OVAKPESDGXLCBRT"
ROW = re.compile(r"^\| ([A-Z]\d+) \| (.+?) \| (.+?) \| (.+?) \| (.*?) ?\| (.+?) \|$", re.MULTILINE)
ID = rf"[{FAMILIES}][0-9]{{1,2}}"
LIST = rf"({ID}(?:(?:, | and | to ){ID})*)"
CITED = re.compile(rf"[Cc]lauses?:? {LIST}|\({LIST}\)")
RANGE = re.compile(r"([A-Z])(\d+) to \1(\d+)")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def clauses(text: str) -> list[str]:
    """Identifiers of the rows of the contract's tables, in order."""
    return [match[1] for match in ROW.finditer(text)]


def citations(text: str) -> set[str]:
    """Identifiers cited as `clause X1`, as `(X1)` or in such a list; ranges are spelt out."""
    cited: set[str] = set()
    for match in CITED.finditer(text):
        listed = match[1] or match[2]
        cited |= set(re.findall(ID, listed))
        for family, first, last in RANGE.findall(listed):
            cited |= {f"{family}{number}" for number in range(int(first), int(last) + 1)}
    return cited


def citing_files(root: Path) -> list[Path]:
    """Code of the package, tests, and documents."""
    return [*house_rules.code_files(root), *sorted((root / "docs").rglob("*.md"))]


def test_the_contract_has_a_row_for_every_clause_and_names_none_twice() -> None:
    text = CONTRACT.read_text(encoding="utf-8")
    found = clauses(text)
    begun = re.findall(r"^\| ([A-Z]\d+) \|", text, re.MULTILINE)
    assert found == begun, "a row without its six columns"
    assert [name for name, count in Counter(found).items() if count > 1] == []
    assert {name[0] for name in found} == set(FAMILIES)


def test_the_clauses_of_a_family_are_numbered_without_a_gap() -> None:
    found = clauses(CONTRACT.read_text(encoding="utf-8"))
    for family in FAMILIES:
        numbers = [int(name[1:]) for name in found if name[0] == family]
        assert numbers == list(range(1, len(numbers) + 1)), family


def test_every_cited_clause_exists() -> None:
    known = set(clauses(CONTRACT.read_text(encoding="utf-8")))
    this = Path(__file__).resolve()
    unknown = {
        path.relative_to(ROOT).as_posix(): sorted(citations(path.read_text("utf-8")) - known)
        for path in citing_files(ROOT)
        if path.resolve() != this
    }
    assert {name: ids for name, ids in unknown.items() if ids} == {}


def test_the_contract_cited_by_its_own_docstrings_is_not_empty() -> None:
    cited: set[str] = set()
    for path in house_rules.code_files(ROOT, "hal"):
        cited |= citations(path.read_text(encoding="utf-8"))
    assert {"O1", "O3", "O4", "A1", "K1", "K2", "V3"} <= cited


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(clause O1)", {"O1"}),
        ("see clause X99", {"X99"}),
        ("(X98, O1 and K2)", {"X98", "O1", "K2"}),
        ("(clauses K1, K2)", {"K1", "K2"}),
        ("a thread ends (K5).", {"K5"}),
        ("Clauses: V1 to V3, A2.", {"V1", "V2", "V3", "A2"}),
        ("(O5, L1 to L3)", {"O5", "L1", "L2", "L3"}),
        ("int8 and float16, version 0.1, T = 4", set()),
    ],
)
def test_citations_are_recognised(text: str, expected: set[str]) -> None:
    assert citations(text) == expected


def test_a_row_short_of_a_column_or_named_twice_is_seen() -> None:
    whole = "| O1 | text | required | `hal/` | | owed |\n"
    assert clauses(whole * 2) == ["O1", "O1"]
    assert clauses("| O1 | text | required | `hal/` |\n") == []


def test_what_the_contract_points_at_exists() -> None:
    text = CONTRACT.read_text(encoding="utf-8")
    paths = {
        path
        for row in ROW.finditer(text)
        for column in (row[4], row[6])
        for path in re.findall(r"`([a-z_./]+)`", column)
    }
    assert len(paths) > 10
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_required_clause_says_what_tests_it_or_that_it_is_owed() -> None:
    rows = list(ROW.finditer(CONTRACT.read_text(encoding="utf-8")))
    vague = [row[1] for row in rows if not re.search(r"`tests/|\bconformance \(|\bowed\b", row[6])]
    unkind = [
        row[1] for row in rows if not re.match(r"required|reported|capabilit(y|ies)\b", row[3])
    ]
    assert (vague, unkind) == ([], [])


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = _leaves(config["nav"])
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert set(listed) == pages
    assert len(listed) == len(pages)


def test_every_link_between_documents_leads_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    dead = [
        f"{document.relative_to(ROOT)}: {match[1]}"
        for document in documents
        for match in LINK.finditer(document.read_text(encoding="utf-8"))
        if "://" not in match[1] and not (document.parent / match[1]).exists()
    ]
    assert dead == []


def test_every_module_that_a_design_page_names_exists() -> None:
    named = {
        (page.name, path)
        for page in (ROOT / "docs" / "design").glob("*.md")
        for path in re.findall(
            r"`((?:hal|backends|balancer|pipeline|src)/[\w./]*)`", page.read_text()
        )
    }
    assert len(named) > 10
    assert [entry for entry in sorted(named) if not (ROOT / entry[1]).exists()] == []


def _leaves(node: object) -> list[str]:
    if isinstance(node, str):
        return [node]
    if isinstance(node, dict):
        return [leaf for value in node.values() for leaf in _leaves(value)]
    assert isinstance(node, list)
    return [leaf for value in node for leaf in _leaves(value)]
