"""What the figures say that the engine was told."""

from dataclasses import fields
from pathlib import Path

from equipoise.demo.settings import Balance, CommitMode, RoutingRule, RunSettings, Shares
from equipoise.demo.told import is_ours, told


def test_each_path_is_told_its_own_bounds() -> None:
    boundary, locked = told(RunSettings()), told(RunSettings(commit=CommitMode.LOCKED))
    assert {"in_flight", "parcel"} == boundary.keys() - locked.keys()
    assert {"layer_updates_per_iter"} == locked.keys() - boundary.keys()
    assert boundary.keys() | locked.keys() <= {field.name for field in fields(RunSettings)}


def test_room_in_flight_is_what_there_was_and_not_what_was_asked_for() -> None:
    assert told(RunSettings(in_flight=700_000))["in_flight"] == 11 * 61_440
    assert told(RunSettings(in_flight=1 << 40))["in_flight"] == 60 * 61_440
    assert told(RunSettings())["in_flight"] == 20 * 61_440


def test_nothing_is_told_where_nothing_balances() -> None:
    assert told(RunSettings(balance=Balance.OFF)) == {}
    assert told(RunSettings(placement=Path("p"))) == {"rule": "shares"}


def test_whose_rule_it_was_is_known_later() -> None:
    assert is_ours({})
    assert is_ours(told(RunSettings()))
    assert not is_ours(told(RunSettings(rule=RoutingRule.ROW_HASH, shares=Shares.STATIC)))
