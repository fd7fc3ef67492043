"""What a run cannot be asked for: found before any rank starts, each in one line."""

import os
from collections.abc import Callable
from pathlib import Path

from equipoise.cli.engine_validation import check_engine, check_wishes
from equipoise.cli.files import LAUNCHED, try_file, try_folder
from equipoise.cli.options import RECORD, RunRequest
from equipoise.demo.settings import EXPERTS, LAYERS, Balance, CommitMode, RunSettings
from equipoise.hal.errors import BackendUnavailable, UsageError

MPI = "mpi"
"""The communicator whose ranks no process of ours can start."""
HOST = "cpu"
"""The backend whose streams are threads of the host."""
MOST_RANKS = 64
MOST_MICRO_BATCHES = 16
MOST_SLOTS = 4096
MOST_STEPS = 100_000
MOST_PORT = 65_535
SHORTEST_DEADLINE, LONGEST_DEADLINE = 1, 86_400
"""Seconds: what a healthy rank may need to answer, and a day."""


def validate(request: RunRequest) -> None:
    """Raises UsageError naming the option, what it was and what it may be; leaves nothing."""
    check_wishes(request)
    validate_settings(request.settings)
    _check_outputs(request)


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
    check_count("--ranks", settings.ranks, MOST_RANKS)
    _check_grid(settings)
    if EXPERTS % settings.stage_ranks:
        whose = f"--ranks {settings.ranks}"
        if settings.pipeline_ranks > 1:
            whose += f" in {settings.pipeline_ranks} stages"
        raise UsageError(
            f"{whose} does not divide {EXPERTS} experts evenly: "
            "without balancing each rank holds as many"
        )
    # So written, nan is refused too.
    if not SHORTEST_DEADLINE <= settings.deadline <= LONGEST_DEADLINE:
        raise UsageError(
            f"--deadline must be {SHORTEST_DEADLINE} to {LONGEST_DEADLINE} seconds, "
            f"got {settings.deadline:g}"
        )


def _check_grid(settings: RunSettings) -> None:
    check_count("--pipeline-ranks", settings.pipeline_ranks, LAYERS)
    check_count("--tensor-ranks", settings.tensor_ranks, MOST_RANKS)
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
    if settings.micro_batches:
        check_count("--micro-batches", settings.micro_batches, MOST_MICRO_BATCHES)
        if settings.pipeline_ranks == settings.tensor_ranks == 1:
            raise UsageError("--micro-batches has no meaning with one stage: nothing overlaps")


def check_count(flag: str, value: int, most: int) -> None:
    """Raises UsageError unless `value` is in [1, `most`]."""
    if value < 1:
        raise UsageError(f"{flag} must be at least 1, got {value}")
    if value > most:
        raise UsageError(f"{flag} must be at most {most}, got {value}")


def _check_slots(settings: RunSettings) -> None:
    ranks, slots = settings.stage_ranks, settings.slots
    if slots < EXPERTS:
        raise UsageError(f"--slots {slots} is fewer than the {EXPERTS} experts of a layer")
    if slots > MOST_SLOTS:
        raise UsageError(f"--slots must be at most {MOST_SLOTS} a layer, got {slots}")
    if slots % ranks:
        whose = (
            f"the {ranks} ranks of a stage" if settings.pipeline_ranks > 1 else f"--ranks {ranks}"
        )
        raise UsageError(f"--slots {slots} is not divisible by {whose}")


def _check_cadence(settings: RunSettings) -> None:
    window, interval = settings.window_size, settings.step_interval
    check_count("--steps", settings.steps, MOST_STEPS)
    check_count("--window-size", window, MOST_STEPS)
    check_count("--step-interval", interval, MOST_STEPS)
    if window > interval:
        raise UsageError(f"--window-size {window} is longer than --step-interval {interval}")
    balancing = settings.balance is Balance.ON and settings.placement is None
    if balancing and settings.steps <= window:
        raise UsageError(
            f"--steps {settings.steps} is too few: no step is left after a load window of {window}"
        )
    if settings.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {settings.seed}")


def _check_backends(settings: RunSettings) -> None:
    from equipoise.hal import registry

    check_backend("--backend", settings.backend, registry.ACCELERATORS, registry.accelerator)
    if settings.communicator:
        name = settings.communicator
        check_backend("--communicator", name, registry.COMMUNICATORS, registry.communicator)
    _join_launcher(settings)
    if LAUNCHED not in os.environ:
        check_devices(settings.backend, settings.communicator, settings.ranks)


def _join_launcher(settings: RunSettings) -> None:
    """Raises UsageError where nobody can start the ranks, or others have been started."""
    from equipoise.connection import join_launcher
    from equipoise.hal import registry

    name = settings.communicator or registry.accelerator(settings.backend).communicator
    join_launcher(name)
    ranks, launched = settings.ranks, os.environ.get(LAUNCHED)
    if launched is None and registry.communicator(name).name == MPI:
        raise UsageError(
            f"--communicator {name}: mpiexec has to start its ranks: "
            f"mpiexec -n {ranks} equipoise run --communicator {name} --ranks {ranks}"
        )
    if launched is not None and launched != str(ranks):
        raise UsageError(f"--ranks {ranks}: the launcher has started {launched}: give --ranks that")


def _check_commit(settings: RunSettings) -> None:
    """A step of the demo is one program that waits for its device: elsewhere it holds the mover up.

    The device would wait for the mover's copy, and the mover for the end of the program.
    """
    if settings.commit is CommitMode.IN_PLACE and settings.backend != HOST:
        raise UsageError(
            f"--commit locked is for --backend {HOST} here, not {settings.backend}: the demo waits "
            "for its device within a step; --commit boundary works everywhere"
        )


def check_devices(backend: str, communicator: str | None, ranks: int) -> None:
    """Raises UsageError where this machine has too few devices for so many ranks to start here."""
    from equipoise.hal import registry
    from equipoise.hal.accelerator import check_room
    from equipoise.hal.capabilities import Unavailable

    found = registry.accelerator(backend)
    links = registry.communicator(communicator or found.communicator)
    if links.joined() is not None or isinstance(found.probe(), Unavailable):
        return  # a launcher has started them; or there is more to say than a number
    try:
        check_room(found, links, ranks)
    except UsageError as error:
        raise UsageError(f"--ranks {ranks}: {error}") from error


def check_backend(flag: str, name: str, group: str, find: Callable[[str], object]) -> None:
    """Raises UsageError unless `name` is registered in `group`, or can be imported by `find`."""
    from equipoise.hal import registry

    known = registry.names(group)
    if ":" in name:
        _check_object(flag, name, find)
    elif name not in known:
        raise UsageError(f"{flag}: unknown name {name!r}; known: {', '.join(known) or 'none'}")


def _check_object(flag: str, name: str, find: Callable[[str], object]) -> None:
    """A PACKAGE:OBJECT is the user's own module, which may fail to import in any way it likes."""
    try:
        find(name)
    except BackendUnavailable as error:
        raise UsageError(f"{flag}: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{flag}: backend {name!r} does not import: {reason}") from error


def _check_outputs(request: RunRequest) -> None:
    """What a run writes can be written, each into a file of its own."""
    out = request.settings.out
    check_folder("--out", out)
    taken: dict[str, str] = {}
    if request.settings.placement is not None:
        taken[os.path.realpath(request.settings.placement)] = "--placement"
    outputs = (
        (f"--out's {RECORD}", out / RECORD),
        ("--json", request.json),
        ("--html", request.html),
        *([] if request.trace is None else [("--trace", request.trace)]),
    )
    for name, path in outputs:
        check_file(name, path)
        other = taken.setdefault(os.path.realpath(path), name)
        if other != name:
            how = "read from" if other == "--placement" else "written to"
            raise UsageError(f"{name}: {path} is the file that {other} is {how}")
    try_folder("--out", out)
    for name, path in outputs:
        try_file(name, path)


def _check_traffic(settings: RunSettings) -> None:
    from equipoise.demo.traffic import load_phases

    phases = load_phases(settings.text)
    if settings.steps < len(phases):
        raise UsageError(f"--steps {settings.steps} is fewer than the {len(phases)} texts")


def _check_watching(settings: RunSettings) -> None:
    check_count("--log-balancedness-interval", settings.log_balancedness_interval, MOST_STEPS)
    if settings.metrics_port is not None:
        _check_ports(settings.metrics_port, settings)
    if settings.wandb:
        from equipoise.balancer.observe.wandb import require as require_wandb

        require_wandb()


def _check_ports(first: int, settings: RunSettings) -> None:
    """Every rank that starts on this machine can serve its metrics."""
    from equipoise.balancer.observe.metrics import LOOPBACK, PortTaken, check_free, require

    check_count("--metrics-port", first, MOST_PORT - settings.ranks + 1)
    require()
    if LAUNCHED in os.environ:
        return  # who else is a rank here is for each of them to find out
    address = settings.metrics_address
    asked = "" if address == LOOPBACK else f"--metrics-address {address} "
    for rank in range(settings.ranks):
        try:
            check_free(first + rank, address)
        except PortTaken as error:
            raise UsageError(f"{asked}--metrics-port {first}: rank {rank}: {error}") from error


def check_folder(flag: str, path: Path) -> None:
    """Raises UsageError unless `path` is a folder that can be written to, or can be made."""
    nearest = next((p for p in (path, *path.absolute().parents) if os.path.lexists(p)), path)
    if not nearest.is_dir():
        raise UsageError(f"{flag}: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"{flag}: {nearest} cannot be written to")


def check_file(flag: str, path: Path) -> None:
    """Raises UsageError unless `path` can be written as a file."""
    if path.is_dir():
        raise UsageError(f"{flag}: {path} is a folder, not a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"{flag}: {path} cannot be written to")
    check_folder(flag, path.parent)
