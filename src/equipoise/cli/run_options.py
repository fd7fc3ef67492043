"""The options of `equipoise run`: each is a flag and a key of the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from equipoise.cli import kinds
from equipoise.cli.option import Option
from equipoise.demo.settings import (
    EXPERTS,
    Balance,
    ExchangeForm,
    Locality,
    RoutingRule,
    RunSettings,
    Shares,
    VariantName,
)
from equipoise.hal.errors import UsageError

RECORD_FILE = "record.npz"
"""File in the folder of a run that holds everything measured."""

RANKS, TRAFFIC, BALANCING, OUTPUT = "ranks", "traffic", "balancing", "output"
PLANS, MOVES, WATCHING = "what plans aim at", "how weights move", "watching"


OPTIONS = (
    Option(key="ranks", kind=kinds.WHOLE, group=RANKS, metavar="N",
           help="processes to serve on; each holds slots/N slots of every layer"),
    Option(key="pipeline_ranks", kind=kinds.WHOLE, group=RANKS, metavar="N",
           help="stages that the ranks are divided into, each with a part of the layers; "
           "activations go from stage to stage, and experts are shared within one"),
    Option(key="micro_batches", kind=kinds.WHOLE, group=RANKS, metavar="N",
           shown_default="as many as there are stages",
           help="parts of a step's requests that are under way at once, where there are stages"),
    Option(key="tensor_ranks", kind=kinds.WHOLE, group=RANKS, metavar="N",
           help="ranks of a stage that serve the same requests: each sends a slice of the rows to "
           "experts, and hands a slice of them to the next stage"),
    Option(key="backend", kind=kinds.NAME, group=RANKS, metavar="NAME",
           help="accelerator to run on (`equipoise doctor` lists them)"),
    Option(key="communicator", kind=kinds.NAME, group=RANKS, metavar="NAME",
           shown_default="the one that goes with the backend", help="communicator between ranks"),
    Option(key="exchange", kind=kinds.EXCHANGE, group=RANKS, metavar="|".join(ExchangeForm),
           help="how tokens come to their experts: portable, whose host reads the counts of every "
           "layer, or fixed, whose messages have one size and whose counts stay on the device"),
    Option(key="deadline", kind=kinds.SECONDS, group=RANKS, metavar="SECONDS",
           help="longest that anything waits for another rank"),
    Option(key="steps", kind=kinds.WHOLE, group=TRAFFIC, metavar="N",
           help="forwards to serve, divided evenly among the texts"),
    Option(key="text", kind=kinds.TEXTS, group=TRAFFIC, metavar="FILE",
           shown_default="shipped samples of Python, Chinese and tables",
           help="UTF-8 files to serve, one phase of traffic each, in this order"),
    Option(key="seed", kind=kinds.WHOLE, group=TRAFFIC, metavar="N",
           help="which prompts are cut from the texts"),
    Option(key="slots", kind=kinds.WHOLE, group=BALANCING, metavar="N",
           help=f"slots per layer over all ranks, at least {EXPERTS}"),
    Option(key="num_redundant_experts", kind=kinds.WHOLE, group=BALANCING, metavar="N",
           shown_default="none", help=f"the same as --slots {EXPERTS} + N"),
    Option(key="shares", kind=kinds.SHARES, group=BALANCING, metavar="|".join(Shares),
           help="how an expert's rows are divided among its replicas: as planned, from the "
           "last load, or so that each batch is level: that of a rank, of the ranks of a node "
           "together, or of all ranks"),
    Option(key="variants", kind=kinds.VARIANTS, group=BALANCING, metavar="NAME",
           shown_default="all that the other options allow",
           help="which rows of the table to serve, of unbalanced, static, lagged, local, node, "
           "exact, and placement with --placement; fewer take less time, and unbalanced alone "
           "serves without balancing. Without --shares the run is about the last of them in this "
           "order. Every one is compared with one process that serves alone"),
    Option(key="locality", kind=kinds.LOCALITY, group=BALANCING, metavar="|".join(Locality),
           help="which replica is preferred where shares leave a choice: any, or those on the "
           "row's own rank, up to what they take; that goes with --shares exact"),
    Option(key="routing_rule", kind=kinds.RULE, group=BALANCING, metavar="|".join(RoutingRule),
           help="who picks a replica: the shares, or another engine's rule to the bit, which "
           "divides evenly, so that only --shares static goes with it and is its default"),
    Option(key="placement", kind=kinds.PATH, group=BALANCING, metavar="FILE", shown_default="none",
           help="serve this placement with its shares, in any format, and move nothing; instead "
           "of --shares"),
    Option(key="window_size", kind=kinds.WHOLE, group=BALANCING, metavar="STEPS",
           help="steps of load that a plan is made from"),
    Option(key="step_interval", kind=kinds.WHOLE, group=BALANCING, metavar="STEPS",
           help="steps from one plan to the next"),
    Option(key="target", kind=kinds.REAL, group=PLANS, metavar="X",
           help="imbalance, max/mean - 1 of the ranks, mean over layers, that is good enough"),
    Option(key="slack", kind=kinds.REAL, group=PLANS, metavar="X",
           help="room that is kept on each rank for shares, as part of the mean: 0 to 1"),
    Option(key="sigma", kind=kinds.REAL, group=PLANS, metavar="Z",
           help="plan for the load of the window and so many standard deviations more: 0 to 100"),
    Option(key="headroom", kind=kinds.WHOLE, group=PLANS, metavar="N",
           help="swaps of two experts in each layer that changes, so that shares have room to "
           "level single batches: 0 to 1000; for the variants local, node and exact"),
    Option(key="min_gain", kind=kinds.REAL, group=PLANS, metavar="X",
           help="imbalance, max/mean - 1, that a layer must gain for any of its weights to move"),
    Option(key="survive", kind=kinds.WHOLE, group=PLANS, metavar="0|1|2",
           help="what no expert may be lost with: 0 nothing, 1 any one rank, 2 any one node; "
           f"from 1 on takes --slots {2 * EXPERTS}"),
    Option(key="nodes", kind=kinds.WHOLE, group=PLANS, metavar="N",
           help="machines that the ranks count as being on, evenly, neighbours together: copies "
           "come from the same one where they can"),
    Option(key="commit", kind=kinds.COMMIT, group=MOVES, metavar="staged|in_place",
           help="how weights come into slots: from peers, between two steps; or from the host's "
           "memory, a few layers a step, each under a stream lock"),
    Option(key="staging_bytes", kind=kinds.BYTES, group=MOVES, metavar="BYTES",
           shown_default="two layers of which every slot changes",
           help="staged: weights on their way into a rank at once, such as 2MiB, which is "
           "memory of the device; at least a slot. With less than a rank holds of a layer, what "
           "a layer needs may take several rebalances"),
    Option(key="slots_per_message", kind=kinds.WHOLE, group=MOVES, metavar="SLOTS",
           help="staged: slots that travel in one message at most"),
    Option(key="layer_updates_per_iter", kind=kinds.WHOLE, group=MOVES, metavar="LAYERS",
           help="in_place: layers that are rewritten in one step"),
    Option(key="max_stalled_steps", kind=kinds.WHOLE, group=MOVES, metavar="STEPS",
           help="steps without progress after which a rebalance is aborted"),
    Option(key="live", kind=kinds.SWITCH, group=WATCHING, shown_default="off",
           help="draw on the terminal what happens while it serves: ranks as bars, the switch of "
           "the text, weights that move; without --variants, serves before and after only"),
    Option(key="log_rebalances", kind=kinds.SWITCH, group=WATCHING, shown_default="off",
           help="one line per rebalance on standard error; aborted ones are logged anyway"),
    Option(key="log_balancedness", kind=kinds.SWITCH, group=WATCHING, shown_default="off",
           help="lines on standard error that say how even the load is"),
    Option(key="log_balancedness_interval", kind=kinds.WHOLE, group=WATCHING, metavar="STEPS",
           help="steps from one such line to the next"),
    Option(key="metrics_port", kind=kinds.WHOLE, group=WATCHING, metavar="PORT",
           shown_default="none",
           help="serve Prometheus metrics while the run lasts: rank 0 on this port, rank r on "
           "PORT + r; needs the extra serve"),
    Option(key="metrics_address", kind=kinds.NAME, group=WATCHING, metavar="ADDRESS",
           help="address to serve them on"),
    Option(key="trace", kind=kinds.PATH, group=WATCHING, metavar="FILE", shown_default="none",
           help="write there what every rank did when, for Perfetto or Chrome, as JSON"),
    Option(key="wandb", kind=kinds.NAME, group=WATCHING, metavar="PROJECT", shown_default="none",
           help="log rebalances to this project at Weights & Biases; needs the extra wandb"),
    Option(key="out", kind=kinds.PATH, group=OUTPUT, metavar="DIR",
           help="folder of summary.json and report.html"),
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE",
           shown_default="DIR/summary.json", help="write the figures there instead"),
    Option(key="html", kind=kinds.PATH, group=OUTPUT, metavar="FILE",
           shown_default="DIR/report.html", help="write the report there instead"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, help="no progress, only the table"),
)  # fmt: skip

BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True)
class RunRequest:
    """What one `equipoise run` was asked for; `progress` is `shown` or `hidden`.

    `trace` is None where none is asked for; `explicit_options` are the keys that got a value on the
    command line or in a file.
    """

    settings: RunSettings
    json: Path
    html: Path
    progress: str
    trace: Path | None = None
    explicit_options: frozenset[str] = frozenset()


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
        progress="hidden" if values.get("quiet") else "shown",
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


def default_of(option: Option) -> str:
    """Default of an option, as `--help` shows it."""
    if option.shown_default:
        return option.shown_default
    if option.key == "quiet":
        return "off"
    return str({field.name: field.default for field in fields(RunSettings)}[option.key])


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
    if redundant < 0:
        raise UsageError(f"num_redundant_experts must be at least 0, got {redundant}")
    return plain | {"slots": EXPERTS + redundant}
