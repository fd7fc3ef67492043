"""Checks the settings of a run before any rank starts; each error is one line naming the option.

Ranges first, then options that contradict each other, then options that would have no effect.
"""

import os
from collections.abc import Mapping, Set

from equipoise.cli.files import LAUNCHER_VARIABLE, probe_file, probe_folder
from equipoise.cli.offline import RECORD_FILE
from equipoise.cli.option_checks import (
    MAX_PORT,
    check_backend,
    check_devices,
    check_file,
    check_folder,
    check_terminal,
)
from equipoise.cli.run_options import BY_KEY, RunRequest
from equipoise.demo.settings import (
    EXPERTS,
    MOVES,
    PLANS,
    SLOT_BYTES,
    Balance,
    CommitMode,
    Locality,
    RoutingRule,
    RunSettings,
    Shares,
    VariantName,
    available_variants,
    served_variants,
)
from equipoise.hal.errors import UsageError
from equipoise.option import flag_of

INEFFECTIVE_WITH_COMMIT = {
    CommitMode.STAGED: {"layer_updates_per_iter": "layers are not rewritten in place"},
    CommitMode.IN_PLACE: {
        "staging_bytes": "nothing is staged",
        "slots_per_message": "nothing travels between ranks",
    },
}
"""Options that have no effect with a commit mode, and why."""
LEVELLED_VARIANTS = {VariantName.LOCAL, VariantName.NODE, VariantName.EXACT}
"""Those whose plans leave shares room to level batches."""
INEFFECTIVE_UNBALANCED = {
    **dict.fromkeys(("slots", "shares", "locality", "routing_rule"), "every expert has one slot"),
    **dict.fromkeys(("window_size", "step_interval"), "nothing is planned"),
    **{option.key: "nothing is planned" for option in BY_KEY.values() if option.group == PLANS},
    **{option.key: "no weight moves" for option in BY_KEY.values() if option.group == MOVES},
    "log_rebalances": "there is no rebalance",
}
"""What makes no sense where nothing is balanced, and why."""


def check_engine(settings: RunSettings) -> None:
    """Raises UsageError for options of plans and moves that contradict each other."""
    _check_rule(settings)
    _check_nodes(settings)
    _check_survival(settings)
    _check_staging(settings)


def check_ineffective_options(request: RunRequest) -> None:
    """Raises UsageError for what was asked for, and would do nothing."""
    settings, explicit = request.settings, request.explicit_options
    if settings.balance is Balance.OFF:
        refuse_ineffective(explicit, INEFFECTIVE_UNBALANCED, "with --variants unbalanced")
    _check_variants(settings)
    how = f"with --commit {settings.commit}"
    refuse_ineffective(explicit, INEFFECTIVE_WITH_COMMIT[settings.commit], how)
    if "headroom" in explicit and not set(served_variants(settings)) & LEVELLED_VARIANTS:
        raise UsageError(
            "--headroom has no meaning without a variant that levels each batch: local, node or "
            "exact"
        )


def refuse_ineffective(explicit: Set[str], reasons: Mapping[str, str], how: str) -> None:
    """Raises UsageError for an option that was set and does nothing; `how` says when."""
    for key, why in reasons.items():
        if key in explicit:
            raise UsageError(f"{flag_of(key)} has no meaning {how}: {why}")


def _check_variants(settings: RunSettings) -> None:
    """The variants that are asked for can be served, and the one that the run is about is there."""
    if not settings.variants:
        return
    for name in settings.variants:
        if settings.variants.count(name) > 1:
            raise UsageError(f"--variants names {name} twice")
    available = available_variants(settings)
    for name in settings.variants:
        if name not in available:
            raise UsageError(
                f"--variants {name} cannot be served {_limit(settings, name)}; "
                f"known: {', '.join(available)}"
            )
    if available[-1] not in settings.variants:
        raise UsageError(
            f"--variants must include {available[-1]}, which the run is about"
            f"{'' if settings.placement else ' (--shares)'}; got {', '.join(settings.variants)}"
        )


def _limit(settings: RunSettings, name: VariantName) -> str:
    """The option that keeps a run from serving a variant, in words."""
    if settings.placement is not None:
        return "with --placement"
    if settings.routing_rule is not RoutingRule.SHARES:
        return f"with --routing-rule {settings.routing_rule}"
    if name is VariantName.NODE:
        return "with --nodes 1, unless --shares is node"
    return "without --placement"


def _check_rule(settings: RunSettings) -> None:
    if settings.routing_rule is not RoutingRule.SHARES and settings.shares is not Shares.STATIC:
        raise UsageError(
            f"--routing-rule {settings.routing_rule} reads no shares: --shares must be static, "
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
            f"--nodes {settings.nodes} does not divide the {settings.stage_ranks} ranks "
            f"{'of a stage ' if settings.pipeline_ranks > 1 else ''}evenly"
        )


def _check_survival(settings: RunSettings) -> None:
    """As the planner would say, rebalance after rebalance."""
    if not settings.survive:
        return
    if settings.slots < 2 * EXPERTS:
        raise UsageError(
            f"--survive {settings.survive} takes two slots an expert: --slots must be at least "
            f"{2 * EXPERTS}, got {settings.slots}"
        )
    for key, least in (("ranks", 1), ("nodes", 2)):
        if settings.survive >= least and getattr(settings, key) < 2:
            flag = f"--survive {settings.survive}"
            raise UsageError(f"{flag} takes --{key} 2 or more, got {getattr(settings, key)}")


def _check_staging(settings: RunSettings) -> None:
    """Through one slot of staging everything moves, step by step; through none, nothing."""
    if settings.staging_bytes is None or settings.commit is CommitMode.IN_PLACE:
        return
    if settings.staging_bytes < SLOT_BYTES:
        raise UsageError(
            f"--staging-bytes {settings.staging_bytes} bytes does not hold a slot: at least "
            f"{SLOT_BYTES // 1024}KiB"
        )


MPI = "mpi"
"""The communicator with ranks that only mpiexec can start."""
HOST_BACKEND = "cpu"
"""The backend with host threads as streams."""


def validate(request: RunRequest) -> None:
    """Raises UsageError naming the option, what it was and what it may be; leaves nothing."""
    check_ineffective_options(request)
    _check_live(request)
    validate_settings(request.settings)
    _check_outputs(request)


def _check_live(request: RunRequest) -> None:
    if not request.settings.live:
        return
    if request.progress == "hidden":
        raise UsageError("--quiet has no meaning with --live, which shows what happens")
    check_terminal()


def validate_settings(settings: RunSettings) -> None:
    """Raises UsageError for what cannot be served; creates nothing."""
    _check_ranks(settings)
    _check_slots(settings)
    _check_cadence(settings)
    _check_backends(settings)
    _check_commit(settings)
    check_engine(settings)
    _check_traffic(settings)
    _check_watching(settings)


def _check_ranks(settings: RunSettings) -> None:
    _check_grid(settings)
    if EXPERTS % settings.stage_ranks:
        owner = f"--ranks {settings.ranks}"
        if settings.pipeline_ranks > 1:
            owner += f" in {settings.pipeline_ranks} stages"
        raise UsageError(
            f"{owner} does not divide {EXPERTS} experts evenly: "
            "without balancing each rank holds as many"
        )


def _check_grid(settings: RunSettings) -> None:
    if settings.ranks % settings.pipeline_ranks:
        raise UsageError(
            f"--ranks {settings.ranks} cannot be divided into {settings.pipeline_ranks} stages "
            "of equally many (--pipeline-ranks)"
        )
    if settings.stage_ranks % settings.tensor_ranks:
        raise UsageError(
            f"--tensor-ranks {settings.tensor_ranks} does not divide the {settings.stage_ranks} "
            "rank(s) of a stage"
        )
    if settings.micro_batches and settings.pipeline_ranks == settings.tensor_ranks == 1:
        raise UsageError("--micro-batches has no meaning with one stage: nothing overlaps")


def _check_slots(settings: RunSettings) -> None:
    ranks, slots = settings.stage_ranks, settings.slots
    if slots % ranks:
        divisor = (
            f"the {ranks} ranks of a stage" if settings.pipeline_ranks > 1 else f"--ranks {ranks}"
        )
        raise UsageError(f"--slots {slots} is not divisible by {divisor}")


def _check_cadence(settings: RunSettings) -> None:
    window, interval = settings.window_size, settings.step_interval
    if window > interval:
        raise UsageError(f"--window-size {window} is longer than --step-interval {interval}")
    balancing = settings.balance is Balance.ON and settings.placement is None
    if balancing and settings.steps <= window:
        raise UsageError(
            f"--steps {settings.steps} is too few: no step is left after a load window of {window}"
        )


def _check_backends(settings: RunSettings) -> None:
    from equipoise.hal import registry

    check_backend("--backend", settings.backend, registry.ACCELERATORS, registry.accelerator)
    if settings.communicator:
        name = settings.communicator
        check_backend("--communicator", name, registry.COMMUNICATORS, registry.communicator)
    _join_launcher(settings)
    if LAUNCHER_VARIABLE not in os.environ:
        check_devices(settings.backend, settings.communicator, settings.ranks)


def _join_launcher(settings: RunSettings) -> None:
    """Raises UsageError where the ranks cannot be started here, or others have been."""
    from equipoise.connection import join_launcher
    from equipoise.hal import registry

    name = settings.communicator or registry.accelerator(settings.backend).communicator
    if not name:
        raise UsageError(
            f"--backend {settings.backend} has no communicator of its own: give --communicator"
        )
    join_launcher(name)
    ranks, launched = settings.ranks, os.environ.get(LAUNCHER_VARIABLE)
    if launched is None and registry.communicator(name).name == MPI:
        raise UsageError(
            f"--communicator {name}: mpiexec has to start its ranks: "
            f"mpiexec -n {ranks} equipoise run --communicator {name} --ranks {ranks}"
        )
    if launched is not None and launched != str(ranks):
        raise UsageError(f"--ranks {ranks}: the launcher has started {launched}: give --ranks that")


def _check_commit(settings: RunSettings) -> None:
    """Raises UsageError for an in-place commit on a device.

    A step of the demo is one program that waits for its device: the device would wait for the
    writer's copy, and the writer for the end of the program.
    """
    if settings.commit is CommitMode.IN_PLACE and settings.backend != HOST_BACKEND:
        raise UsageError(
            f"--commit in_place is for --backend {HOST_BACKEND} here, not {settings.backend}: the "
            "demo waits for its device within a step; --commit staged works everywhere"
        )


def _check_outputs(request: RunRequest) -> None:
    """What a run writes can be written, each into a file of its own."""
    out = request.settings.out
    check_folder("--out", out)
    uses: dict[str, str] = {}
    if request.settings.placement is not None:
        uses[os.path.realpath(request.settings.placement)] = "--placement"
    outputs = (
        (f"--out's {RECORD_FILE}", out / RECORD_FILE),
        ("--json", request.json),
        ("--html", request.html),
        *([] if request.trace is None else [("--trace", request.trace)]),
    )
    for name, path in outputs:
        check_file(name, path)
        use = uses.setdefault(os.path.realpath(path), name)
        if use != name:
            how = "read from" if use == "--placement" else "written to"
            raise UsageError(f"{name}: {path} is the file that {use} is {how}")
    probe_folder("--out", out)
    for name, path in outputs:
        probe_file(name, path)


def _check_traffic(settings: RunSettings) -> None:
    from equipoise.demo.traffic import load_phases

    phases = load_phases(settings.text)
    if settings.steps < len(phases):
        raise UsageError(f"--steps {settings.steps} is fewer than the {len(phases)} texts")


def _check_watching(settings: RunSettings) -> None:
    if settings.metrics_port is not None:
        _check_ports(settings.metrics_port, settings)
    if settings.wandb:
        from equipoise.balancer.observe.wandb_module import require_wandb as require_wandb

        require_wandb()


def _check_ports(first: int, settings: RunSettings) -> None:
    """Every rank that starts on this machine can serve its metrics."""
    from equipoise.balancer.observe.metrics import (
        LOOPBACK,
        PortTaken,
        check_port_free,
        require_prometheus,
    )

    last = MAX_PORT - settings.ranks + 1
    if first > last:
        raise UsageError(f"--metrics-port must be 1 to {last}, got {first}")
    require_prometheus()
    if LAUNCHER_VARIABLE in os.environ:
        return  # each rank tries its own port
    address = settings.metrics_address
    address_flag = "" if address == LOOPBACK else f"--metrics-address {address} "
    for rank in range(settings.ranks):
        try:
            check_port_free(first + rank, address)
        except PortTaken as error:
            raise UsageError(
                f"{address_flag}--metrics-port {first}: rank {rank}: {error}"
            ) from error
