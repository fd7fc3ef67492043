"""docs/claims.md: every family has its test, and the page is what the script prints."""

import pytest
from conformance.mutants.collection import mutants
from helpers import claims
from helpers.claims import SECTIONS, Family, Tier
from helpers.paths import ROOT, TESTS

FAMILIES = [family for families in SECTIONS.values() for family in families]


def test_claims_page_is_what_the_script_prints() -> None:
    assert (ROOT / "docs" / "claims.md").read_text("utf-8") == claims.page(), claims.__doc__


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family_has_lost_no_member_and_names_none_twice(family: Family) -> None:
    members = family.members()
    assert len(members) == len(set(members)) >= family.before - len(family.removed)
    assert not set(members) & set(family.removed)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family_that_only_deep_proves_says_why(family: Family) -> None:
    found = [tier for _, tier in claims.functions(TESTS / family.proof, family.token)]
    assert found, "no test in that file has that token"
    assert family.moved or {*found} != {Tier.DEEP}


def test_members_read_from_source_are_those_of_the_collection() -> None:
    read = claims.literal("conformance/mutants", "MUTANTS")()
    assert sorted(read) == sorted(mutant.name for mutant in mutants())


def test_folder_with_deep_tests_says_why() -> None:
    assert set(claims.marked()) <= set(claims.REASONS)


def test_collection_whose_members_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="is no tuple and no dictionary"):
        claims.literal("helpers/tiers.py", "PROFILE")()


def test_tier_of_a_test_follows_from_its_folder_and_marks() -> None:
    tiers = {family.name: family.tier for family in FAMILIES}
    assert tiers["mutants of the conformance suite"] is Tier.TOX
    assert tiers["healthy virtual backend from 20 seeds"] is Tier.DEEP
