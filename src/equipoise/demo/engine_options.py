"""Options of the balancing engine as a run record keeps them: those that had an effect."""

from equipoise.demo.settings import (
    SLOT_BYTES,
    Balance,
    CommitMode,
    RoutingRule,
    RunSettings,
    Shares,
    staging_buffers,
)

EngineOptions = dict[str, str | int | float]
AIMS = ("window_size", "step_interval", "target", "slack", "sigma", "min_gain")
BOUNDS = ("survive", "nodes", "max_stalled_steps")


def engine_options(run: RunSettings) -> EngineOptions:
    """By option, in its own words; only what had a meaning in this run.

    `staging_bytes` is what there was room for, in bytes of a rank.
    """
    if run.balance is Balance.OFF:
        return {}
    if run.placement is not None:
        return {"routing_rule": str(run.routing_rule)}
    options: EngineOptions = {"commit": str(run.commit), "routing_rule": str(run.routing_rule)}
    if run.shares is Shares.EXACT:
        options["locality"] = str(run.locality)
    options |= {key: getattr(run, key) for key in (*AIMS, *BOUNDS)}
    if run.shares in (Shares.LOCAL, Shares.NODE, Shares.EXACT):
        options["headroom"] = run.headroom
    if run.commit is CommitMode.IN_PLACE:
        return options | {"layer_updates_per_iter": run.layer_updates_per_iter}
    return options | {
        "staging_bytes": staging_buffers(run) * SLOT_BYTES,
        "slots_per_message": run.slots_per_message,
    }


def uses_shares(options: EngineOptions) -> bool:
    """Whether shares picked the replicas, and not another engine's rule."""
    return options.get("routing_rule", RoutingRule.SHARES) == RoutingRule.SHARES
