"""What the engine of a run cannot be asked for: found before any rank starts, each in one line."""

from collections.abc import Set

from equipoise.balancer.experts.config import PLANNER_LIMITS
from equipoise.cli.options import BY_KEY, MOVES, OPTIONS, PLANS, RunRequest
from equipoise.demo.settings import (
    EXPERTS,
    SLOT_BYTES,
    Balance,
    CommitMode,
    Locality,
    RoutingRule,
    RunSettings,
    Shares,
    available_variants,
)
from equipoise.hal.errors import UsageError

MOST_STEPS = 100_000
MOST_HYSTERESIS = 1000
"""As the target: no layer can gain so much on so few ranks."""
COUNTS = {"parcel": 4096, "layer_updates_per_iter": 4096, "patience": MOST_STEPS, "nodes": 64}
"""The most that each may be; the least is 1."""
WITHOUT = {
    CommitMode.STAGED: {"layer_updates_per_iter": "layers are not rewritten in place"},
    CommitMode.IN_PLACE: {
        "in_flight": "nothing is staged",
        "parcel": "nothing travels between ranks",
    },
}
"""By way to commit: what makes no sense beside it, and why."""
UNBALANCED = {
    **dict.fromkeys(("slots", "shares", "locality", "rule"), "every expert has one slot"),
    **dict.fromkeys(("window_size", "step_interval"), "nothing is planned"),
    **{option.key: "nothing is planned" for option in OPTIONS if option.group == PLANS},
    **{option.key: "no weight moves" for option in OPTIONS if option.group == MOVES},
}
"""What makes no sense where nothing is balanced, and why."""


def check_engine(settings: RunSettings) -> None:
    """Raises UsageError naming the option, what it was and what it may be."""
    for key, most in COUNTS.items():
        value = getattr(settings, key)
        if not 1 <= value <= most:
            raise UsageError(f"{BY_KEY[key].name} must be 1 to {most}, got {value}")
    for key, most in {**PLANNER_LIMITS, "hysteresis": MOST_HYSTERESIS}.items():
        value = getattr(settings, key)
        if not 0 <= value <= most:
            raise UsageError(f"{BY_KEY[key].name} must be 0 to {most}, got {value:g}")
    _check_rule(settings)
    _check_nodes(settings)
    _check_survival(settings)
    _check_staging(settings)


def check_wishes(request: RunRequest) -> None:
    """Raises UsageError for what was asked for, and would do nothing."""
    settings, said = request.settings, request.said
    if settings.balance is Balance.OFF:
        alone = "variants" in said and "balance" not in said
        check_unbalanced(said, f"with --{'variants unbalanced' if alone else 'no-balance'}")
    _check_variants(settings)
    for key, why in WITHOUT[settings.commit].items():
        if key in said:
            name = BY_KEY[key].name
            raise UsageError(f"{name} has no meaning with --commit {settings.commit}: {why}")
    if "metrics_address" in said and settings.metrics_port is None:
        raise UsageError("--metrics-address has no meaning without --metrics-port: none are served")
    if "log_balancedness_interval" in said and not settings.log_balancedness:
        raise UsageError(
            "--log-balancedness-interval has no meaning without --log-balancedness: "
            "no line is written"
        )


def check_unbalanced(said: Set[str], how: str) -> None:
    """Raises UsageError for what would do nothing where nothing is balanced; `how` says why not."""
    for key, why in UNBALANCED.items():
        if key in said:
            raise UsageError(f"{BY_KEY[key].name} has no meaning {how}: {why}")


def _check_variants(settings: RunSettings) -> None:
    """The variants that are asked for can be served, and the one that the run is about is there."""
    if not settings.variants:
        return
    available = available_variants(settings)
    for name in settings.variants:
        if name not in available:
            raise UsageError(
                f"--variants {name} cannot be served {_limit(settings)}; "
                f"known: {', '.join(available)}"
            )
    if available[-1] not in settings.variants:
        raise UsageError(
            f"--variants must include {available[-1]}, which the run is about"
            f"{'' if settings.placement else ' (--shares)'}; got {', '.join(settings.variants)}"
        )


def _limit(settings: RunSettings) -> str:
    """The option that decides which variants a run can serve, in words."""
    if settings.placement is not None:
        return "with --placement"
    if settings.balance is Balance.OFF:
        return "with --no-balance"
    if settings.rule is not RoutingRule.SHARES:
        return f"with --rule {settings.rule}"
    return "without --placement"


def _check_rule(settings: RunSettings) -> None:
    if settings.rule is not RoutingRule.SHARES and settings.shares is not Shares.STATIC:
        raise UsageError(
            f"--rule {settings.rule} reads no shares: --shares must be static, "
            f"not {settings.shares}"
        )
    if settings.locality is not Locality.ANY and settings.shares is not Shares.EXACT:
        raise UsageError(
            f"--locality {settings.locality} divides each batch's own counts: --shares must be "
            f"exact, not {settings.shares}"
        )


def _check_nodes(settings: RunSettings) -> None:
    if settings.stage_ranks % settings.nodes:
        raise UsageError(
            f"--nodes {settings.nodes} does not divide --ranks {settings.ranks} evenly"
        )


def _check_survival(settings: RunSettings) -> None:
    """As the planner would say, epoch after epoch."""
    if not settings.survive:
        return
    if settings.slots < 2 * EXPERTS:
        raise UsageError(
            f"--survive {settings.survive} takes two slots an expert: --slots must be at least "
            f"{2 * EXPERTS}, got {settings.slots}"
        )
    for key, least in (("ranks", 1), ("nodes", 2)):
        if settings.survive >= least and getattr(settings, key) < 2:
            what = f"--survive {settings.survive}"
            raise UsageError(f"{what} takes --{key} 2 or more, got {getattr(settings, key)}")


def _check_staging(settings: RunSettings) -> None:
    """Through one slot of staging everything moves, step by step; through none, nothing."""
    if settings.in_flight is None or settings.commit is CommitMode.IN_PLACE:
        return
    if settings.in_flight < SLOT_BYTES:
        raise UsageError(
            f"--in-flight {settings.in_flight} bytes does not hold a slot: at least "
            f"{SLOT_BYTES // 1024}KiB"
        )
