"""The options of `equipoise run`: each is a flag and a key of the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from equipoise.cli.command import Command, Settings
from equipoise.demo.settings import (
    BALANCING,
    EXPERTS,
    MAX_SLOTS,
    WATCHING,
    Balance,
    RoutingRule,
    RunSettings,
    Shares,
    VariantName,
)
from equipoise.hal.errors import UsageError
from equipoise.option import OUTPUT, WHOLE, Option, options_of

"""File in the folder of a run that holds everything measured."""

RUN = """\
Serve real text through the shipped Mixture-of-Experts model on several ranks
while its kind switches, balance the experts online, and compare every output
with that of one process that serves alone."""
EXAMPLES = """\
examples:
  equipoise run                             # four ranks, shipped texts, a report
  equipoise run --ranks 2 --slots 36        # two ranks with four redundant experts
  equipoise run --text a.txt b.txt          # your own texts, one phase each
  equipoise run --variants local            # one way to serve instead of five
  equipoise run --config run.yaml --json figures.json

A configuration file is YAML with the long names as keys and underscores for
hyphens, such as `window_size: 4`; the command line overrides it.

exit code: 0 outputs identical and balancing exercised, 1 one of them not,
2 bad input, 3 the run failed, 130 interrupted, 128 + n ended by signal n"""
REDUNDANT_EXPERTS = Option(
    f"the same as --slots {EXPERTS} + N", BALANCING, kind=WHOLE, least=0, most=MAX_SLOTS - EXPERTS,
    key="num_redundant_experts",
)  # fmt: skip
"""Of no field: it is turned into `slots`."""


@dataclass(frozen=True, kw_only=True)
class RunRequest(Settings):
    """What one `equipoise run` was asked for, besides the settings of serving.

    `explicit_options` are the keys that got a value on the command line or in a file.
    """

    settings: RunSettings
    # fmt: off
    trace: Annotated[Path | None, Option(
        "write there what every rank did when, for Perfetto or Chrome, as JSON", WATCHING)] = None
    json: Annotated[Path, Option(
        "write the figures there instead", OUTPUT, default="DIR/summary.json")]
    html: Annotated[Path, Option(
        "write the report there instead", OUTPUT, default="DIR/report.html")]
    # fmt: on
    explicit_options: frozenset[str] = frozenset()


BY_KEY: Mapping[str, Option] = {
    **{key: option for key, option in options_of(RunSettings).items() if key != "balance"},
    REDUNDANT_EXPERTS.key: REDUNDANT_EXPERTS,
    **options_of(RunRequest),
}


def resolve_run_request(command_line: Mapping[str, Any], file: Mapping[str, Any]) -> RunRequest:
    """Command line over configuration file over default.

    Raises UsageError where one source names both `slots` and `num_redundant_experts`.
    """
    values = merge_sources(command_line, file)
    settings = _with_live_variants(run_settings(_with_shares(values)))
    return RunRequest(
        settings=settings,
        json=values.get("json", settings.out / "summary.json"),
        html=values.get("html", settings.out / "report.html"),
        quiet=values.get("quiet", False),
        trace=values.get("trace"),
        explicit_options=frozenset(values),
    )


def merge_sources(command_line: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Command line over configuration file, `num_redundant_experts` turned into `slots`.

    Raises UsageError where one source names both.
    """
    return _one_slot_count(file, "the configuration file") | _one_slot_count(
        command_line, "the command line"
    )


def run_settings(values: Mapping[str, Any]) -> RunSettings:
    """The settings among `values`; the others are defaults."""
    field_names = {field.name for field in fields(RunSettings)}
    return RunSettings(**{key: value for key, value in values.items() if key in field_names})


def _with_shares(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the shares that the run is about and whether it balances, where not given.

    Another engine's rule goes with static shares only. Otherwise it is the last of the variants
    that are asked for, in the order of the table; with `unbalanced` alone nothing is balanced.
    """
    variants = values.get("variants", ())
    if set(variants) == {VariantName.UNBALANCED} and "placement" not in values:
        return {"balance": Balance.OFF} | dict(values)
    if values.get("routing_rule", RoutingRule.SHARES) is not RoutingRule.SHARES:
        return {"shares": Shares.STATIC} | dict(values)
    modes = [mode for mode in Shares if VariantName(mode) in variants]
    return ({"shares": modes[-1]} if modes else {}) | dict(values)


def _with_live_variants(settings: RunSettings) -> RunSettings:
    """Before and after, where a run is watched and no variants are named: what else there is only
    makes somebody wait who looks on."""
    if not settings.live or settings.variants or settings.balance is Balance.OFF:
        return settings
    if settings.placement is not None:
        return settings
    return replace(settings, variants=(VariantName.UNBALANCED, VariantName(settings.shares)))


def _one_slot_count(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`values` with `num_redundant_experts` turned into `slots`."""
    plain = dict(values)
    redundant = plain.pop("num_redundant_experts", None)
    if redundant is None:
        return plain
    if "slots" in plain:
        raise UsageError(f"{source} gives both slots and num_redundant_experts: give one")
    return plain | {"slots": EXPERTS + redundant}


def _run(request: RunRequest, command: str) -> int:
    # Here, not above: torch and numpy take a second that `--help` need not wait for.
    from equipoise.cli.run import run

    return run(request, command)


COMMAND = Command(
    RunRequest,
    _run,
    description=RUN,
    examples=EXAMPLES,
    options=lambda: BY_KEY,
    request_of=resolve_run_request,
)
