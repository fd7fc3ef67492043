"""What the figures say that the engine was told."""

from dataclasses import fields
from pathlib import Path

from equipoise.demo.engine_options import engine_options, uses_shares
from equipoise.demo.settings import Balance, CommitMode, RoutingRule, RunSettings, Shares


def test_engine_settings_record_has_bounds_of_commit_mode() -> None:
    boundary, in_place = (
        engine_options(RunSettings()),
        engine_options(RunSettings(commit=CommitMode.IN_PLACE)),
    )
    assert {"staging_bytes", "slots_per_message"} == boundary.keys() - in_place.keys()
    assert {"layer_updates_per_iter"} == in_place.keys() - boundary.keys()
    assert boundary.keys() | in_place.keys() <= {field.name for field in fields(RunSettings)}


def test_engine_settings_record_has_effective_in_flight_bytes() -> None:
    assert engine_options(RunSettings(staging_bytes=700_000))["staging_bytes"] == 11 * 61_440
    assert engine_options(RunSettings(staging_bytes=1 << 40))["staging_bytes"] == 60 * 61_440
    assert engine_options(RunSettings())["staging_bytes"] == 20 * 61_440


def test_engine_settings_record_is_empty_without_balancing() -> None:
    assert engine_options(RunSettings(balance=Balance.OFF)) == {}
    assert engine_options(RunSettings(placement=Path("p"))) == {"routing_rule": "shares"}


def test_engine_settings_record_identifies_routing_rule() -> None:
    assert uses_shares({})
    assert uses_shares(engine_options(RunSettings()))
    assert not uses_shares(
        engine_options(RunSettings(routing_rule=RoutingRule.VLLM_ROW_HASH, shares=Shares.STATIC))
    )
