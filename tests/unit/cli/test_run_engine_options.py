"""Every bound of the engine is an option: it arrives, and what cannot be is one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cli.run_options import BY_KEY, resolve_run_request
from equipoise.cli.validation import check_engine
from equipoise.demo.settings import (
    LAYERS,
    MOVES,
    PLANS,
    SLOT_BYTES,
    CommitMode,
    RoutingRule,
    RunSettings,
    Shares,
    staging_buffers,
)
from equipoise.hal.errors import UsageError

OPTION_VALUES: dict[str, tuple[str, object]] = {
    "routing_rule": ("tensorrt_llm", RoutingRule.TRTLLM_ROUND_ROBIN),
    "target": ("0.05", 0.05),
    "slack": ("0", 0.0),
    "sigma": ("1.5", 1.5),
    "min_gain": ("0.02", 0.02),
    "survive": ("1", 1),
    "nodes": ("2", 2),
    "commit": ("staged", CommitMode.STAGED),
    "staging_bytes": ("2MiB", 2 << 20),
    "slots_per_message": ("3", 3),
    "max_stalled_steps": ("9", 9),
}
"""All that goes together: how it is said, and what the run is asked for."""
BAD = {
    "locality of shares that divide no batch": (
        ("--shares", "lagged", "--locality", "prefer"),
        "--locality prefer divides each batch's own counts: --shares must be exact, not lagged",
    ),
    "a locality that is none": (("--locality", "near"), "expected any or prefer, got 'near'"),
    "no target": (("--target", "good"), "--target: expected a number, got 'good'"),
    "a target below balance": (("--target", "-0.1"), "--target must be 0 to 1000, got -0.1"),
    "a target that is no number": (("--target", "nan"), "expected a number, got 'nan'"),
    "slack beyond the mean": (("--slack", "1.1"), "--slack must be 0 to 1, got 1.1"),
    "many swaps": (("--headroom", "1001"), "--headroom must be 0 to 1000, got 1001"),
    "headroom of shares that level no batch": (
        ("--headroom", "4", "--variants", "static", "lagged"),
        "--headroom has no meaning without a variant that levels each batch: local, node or exact",
    ),
    "headroom of another engine's rule": (
        ("--headroom", "4", "--routing-rule", "vllm"),
        "--headroom has no meaning without a variant that levels each batch: local, node or exact",
    ),
    "many deviations": (("--sigma", "101"), "--sigma must be 0 to 100, got 101"),
    "negative minimum gain": (("--min-gain", "-1"), "--min-gain must be 0 to 1000, got -1"),
    "endless minimum gain": (("--min-gain", "1e300"), "must be 0 to 1000, got 1e+300"),
    "a third survival": (("--slots", "64", "--survive", "3"), "--survive must be 0 to 2, got 3"),
    "too few slots to survive": (
        ("--survive", "1"),
        "--survive 1 takes two slots an expert: --slots must be at least 64, got 40",
    ),
    "one rank that survives itself": (
        ("--survive", "1", "--slots", "64", "--ranks", "1"),
        "--survive 1 takes --ranks 2 or more, got 1",
    ),
    "one node that survives itself": (
        ("--survive", "2", "--slots", "64"),
        "--survive 2 takes --nodes 2 or more, got 1",
    ),
    "uneven nodes": (("--nodes", "3"), "--nodes 3 does not divide the 4 ranks evenly"),
    "no node": (("--nodes", "0"), "--nodes must be 1 to 64, got 0"),
    "no slot in a message": (
        ("--slots-per-message", "0"),
        "--slots-per-message must be 1 to 4096, got 0",
    ),
    "no stalled steps": (
        ("--max-stalled-steps", "0"),
        "--max-stalled-steps must be 1 to 100000, got 0",
    ),
    "no layer a step": (
        ("--commit", "in_place", "--layer-updates-per-iter", "0"),
        "--layer-updates-per-iter must be 1 to 4096, got 0",
    ),
    "less than a slot in flight": (
        ("--staging-bytes", "59kiB"),
        "--staging-bytes 60416 bytes does not hold a slot: at least 60KiB",
    ),
    "no staging": (("--staging-bytes", "0"), "expected whole bytes such as 24MiB or 44M"),
    "an unknown rule": (
        ("--routing-rule", "fair"),
        "expected shares or vllm or tensorrt_llm, got 'fair'",
    ),
    "shares that a rule does not read": (
        ("--routing-rule", "vllm", "--shares", "exact"),
        "--routing-rule vllm reads no shares: --shares must be static, not exact",
    ),
    "messages where none is sent": (
        ("--commit", "in_place", "--slots-per-message", "4"),
        "--slots-per-message has no meaning with --commit in_place: nothing travels between ranks",
    ),
    "staging where none is": (
        ("--commit", "in_place", "--staging-bytes", "9MiB"),
        "--staging-bytes has no meaning with --commit in_place: nothing is staged",
    ),
    "rewritten layers where none is": (
        ("--layer-updates-per-iter", "2"),
        "--layer-updates-per-iter has no meaning with --commit staged",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_run_rejects_impossible_engine_options(
    equipoise: Callable[..., Any],
    launched_settings: list[object],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    answer = equipoise("run", *arguments)
    assert (answer.code, answer.out, launched_settings) == (2, "", [])
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line


BESIDE = {
    **{key: text for key, (text, _) in OPTION_VALUES.items()},
    "layer_updates_per_iter": "2",
    "slots": "40",
    "num_redundant_experts": "8",
    "shares": "static",
    "window_size": "4",
    "step_interval": "8",
}
"""All that is only of balancing."""
EACH_SOURCE = pytest.mark.parametrize("source", ["command line", "file"])
ONCE = "target"
"""What a file is tried with: it comes to the same check as the command line."""


@pytest.mark.parametrize(
    ("key", "source"), [*((key, "command line") for key in BESIDE), (ONCE, "file")]
)
def test_balancing_options_are_rejected_with_unbalanced_alone(
    equipoise: Callable[..., Any],
    launched_settings: list[object],
    tmp_path: Path,
    key: str,
    source: str,
) -> None:
    words = [BY_KEY[key].name, BESIDE[key]]
    if source == "file":
        (tmp_path / "run.yaml").write_text(f"{key}: {BESIDE[key]}\n")
        words = ["--config", "run.yaml"]
    answer = equipoise("run", "--variants", "unbalanced", *words)
    assert (answer.code, answer.out, launched_settings) == (2, "", [])
    [line] = answer.err.splitlines()
    name = "--slots" if key == "num_redundant_experts" else BY_KEY[key].name
    assert line.startswith(f"equipoise: error: {name} has no meaning with --variants unbalanced: ")


@EACH_SOURCE
@pytest.mark.parametrize(
    ("key", "value", "needs"),
    [
        ("metrics_address", "127.0.0.1", "--metrics-port"),
        ("log_balancedness_interval", "5", "--log-balancedness"),
    ],
)
def test_dependent_options_are_rejected_alone(
    equipoise: Callable[..., Any],
    launched_settings: list[object],
    tmp_path: Path,
    key: str,
    value: str,
    needs: str,
    source: str,
) -> None:
    (tmp_path / "run.yaml").write_text(f"{key}: {value}\n")
    words = [BY_KEY[key].name, value] if source == "command line" else ["--config", "run.yaml"]
    answer = equipoise("run", *words)
    assert (answer.code, answer.out, launched_settings) == (2, "", [])
    [line] = answer.err.splitlines()
    assert f"{BY_KEY[key].name} needs {needs}: " in line


@pytest.mark.slow
def test_engine_options_arrive_from_command_line(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings]
) -> None:
    flags = [word for key, (text, _) in OPTION_VALUES.items() for word in (BY_KEY[key].name, text)]
    assert equipoise("run", "--quiet", "--slots", "64", *flags).code == 0
    [settings] = launched_settings
    assert {key: getattr(settings, key) for key in OPTION_VALUES} == {
        k: v for k, (_, v) in OPTION_VALUES.items()
    }


@pytest.mark.slow
def test_engine_options_arrive_from_config_file(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings], tmp_path: Path
) -> None:
    lines = [f"{key}: {text}" for key, (text, _) in OPTION_VALUES.items()]
    (tmp_path / "run.yaml").write_text("\n".join([*lines, "slots: 64", "quiet: true"]))
    assert equipoise("run", "--config", "run.yaml").code == 0
    [settings] = launched_settings
    assert {key: getattr(settings, key) for key in OPTION_VALUES} == {
        k: v for k, (_, v) in OPTION_VALUES.items()
    }


def test_engine_option_cases_cover_every_option() -> None:
    """But for one of the locked path, which goes with nothing of the other path, and one of
    levelled shares, which goes with no other engine's rule."""
    bounds = {key for key, option in BY_KEY.items() if option.group in (PLANS, MOVES)}
    alone = {"layer_updates_per_iter", "headroom"}
    assert bounds | {"routing_rule"} == set(OPTION_VALUES) | alone


@pytest.mark.slow
def test_layer_updates_option_arrives_with_in_place_commit(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings]
) -> None:
    line = ("run", "--quiet", "--commit", "in_place", "--layer-updates-per-iter", "5")
    assert equipoise(*line).code == 0
    assert [settings.layer_updates_per_iter for settings in launched_settings] == [5]


@pytest.mark.slow
def test_headroom_option_arrives_with_levelled_shares(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings]
) -> None:
    assert equipoise("run", "--quiet", "--variants", "local", "--headroom", "3").code == 0
    assert [settings.headroom for settings in launched_settings] == [3]


@pytest.mark.parametrize("rule", [rule for rule in RoutingRule if rule is not RoutingRule.SHARES])
def test_engine_routing_rule_defaults_to_static_shares(rule: str) -> None:
    assert resolve_run_request({"routing_rule": rule}, {}).settings.shares is Shares.STATIC
    assert resolve_run_request({}, {"routing_rule": rule}).settings.shares is Shares.STATIC
    request = resolve_run_request({"routing_rule": rule}, {"shares": Shares.LAGGED})
    assert request.settings.shares is Shares.LAGGED
    with pytest.raises(UsageError, match="must be static, not lagged"):
        check_engine(request.settings)


def test_shares_rule_keeps_default_share_mode() -> None:
    assert (
        resolve_run_request({"routing_rule": RoutingRule.SHARES}, {}).settings.shares
        is RunSettings().shares
    )


RUNS = st.builds(
    lambda ranks, more, room: RunSettings(
        ranks=ranks, slots=32 + ranks * more, staging_bytes=None if room is None else room
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 20),
    st.none() | st.integers(1, 2**60),
)


@given(run=RUNS)
def test_staging_buffers_fill_in_flight_budget(run: RunSettings) -> None:
    if run.staging_bytes is not None and run.staging_bytes < SLOT_BYTES:
        with pytest.raises(UsageError, match=f"at least {SLOT_BYTES // 1024}KiB"):
            check_engine(run)
        return
    check_engine(run)
    buffers, a_layer = staging_buffers(run), run.slots // run.ranks
    assert 1 <= buffers <= LAYERS * a_layer
    if run.staging_bytes is None:
        assert buffers >= a_layer, "any layer"
        return
    assert buffers * SLOT_BYTES <= run.staging_bytes
    # Nothing is left over, unless the rank has no more slots.
    assert (buffers + 1) * SLOT_BYTES > run.staging_bytes or buffers == LAYERS * a_layer


@given(run=RUNS)
def test_minimum_in_flight_from_error_message_is_accepted(run: RunSettings) -> None:
    least = f"{SLOT_BYTES // 1024}KiB"
    unbounded = resolve_run_request({}, {"slots": run.slots, "ranks": run.ranks})
    room = BY_KEY["staging_bytes"].kind.from_text(least)
    assert room == BY_KEY["staging_bytes"].kind.from_yaml(yaml.safe_load(least))
    bounded = resolve_run_request({"staging_bytes": room}, {"slots": run.slots, "ranks": run.ranks})
    check_engine(unbounded.settings)
    check_engine(bounded.settings)
