"""`equipoise conformance`."""

import importlib.util
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise import __version__, install_command
from equipoise.cli.config import read_config
from equipoise.cli.conformance_options import BY_KEY, HTML, JSON, ConformanceRequest, resolve
from equipoise.cli.files import write_file
from equipoise.cli.validation import (
    MOST_RANKS,
    check_backend,
    check_count,
    check_devices,
    check_file,
    check_folder,
)
from equipoise.hal import registry
from equipoise.hal.capabilities import Unavailable
from equipoise.hal.errors import UsageError

MOST_CASES = 1_000_000

if TYPE_CHECKING:
    from equipoise.hal.conformance.result import Result


def conformance(arguments: Namespace, command: str) -> int:
    """Test a backend and print what was found; 0 when no clause is violated, else 1.

    Raises UsageError before anything starts.
    """
    request = request_of(vars(arguments))
    validate(request)
    result = _conduct(request)
    if result is None:
        # Started by a launcher as a rank other than 0, which tells the whole story.
        return 0
    from equipoise.report.clauses import render
    from equipoise.report.ink import ink_of_stdout

    try:
        _write(request, result, command)
    finally:
        print(render(result, ink_of_stdout()), flush=True)
    return result.exit_code


def request_of(given: Mapping[str, Any]) -> ConformanceRequest:
    """What the command line asks for, its configuration file included."""
    options = {key: value for key, value in given.items() if key not in ("command", "config")}
    if "only" in options:
        options["only"] = tuple(options["only"])
    file = read_config(given["config"], BY_KEY) if "config" in given else {}
    return resolve(options, file)


def validate(request: ConformanceRequest) -> None:
    """Raises UsageError naming the option, what it was and what it may be; creates nothing."""
    if importlib.util.find_spec("hypothesis") is None:
        raise UsageError(f"the suite draws with hypothesis: {install_command('conformance')}")
    _check_numbers(request)
    check_backend("--backend", request.backend, registry.ACCELERATORS, registry.accelerator)
    _check_available("--backend", request.backend, registry.accelerator)
    if request.communicator is not None:
        name = request.communicator
        check_backend("--communicator", name, registry.COMMUNICATORS, registry.communicator)
        _check_available("--communicator", name, registry.communicator)
    if request.steer is not None:
        _check_steer(request.steer, request.backend)
    else:
        _check_devices(request)
    if request.out is not None:
        check_folder("--out", request.out)
    for flag, path in (("--json", request.json), ("--html", request.html)):
        if path is not None:
            check_file(_typed(flag, path, request), path)
    if request.json is not None and request.json == request.html:
        raise UsageError(f"--html: {request.html} is the file that --json is written to")


def _typed(flag: str, path: Path, request: ConformanceRequest) -> str:
    """What named the file: who gave --out alone has typed no other flag."""
    own = request.out is not None and path == request.out / {"--json": JSON, "--html": HTML}[flag]
    return f"--out's {path.name}" if own else flag


def _check_numbers(request: ConformanceRequest) -> None:
    check_count("--ranks", request.ranks, MOST_RANKS)
    if request.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {request.seed}")
    if request.cases is not None:
        check_count("--cases", request.cases, MOST_CASES)


def _check_available(flag: str, name: str, find: Callable[[str], Any]) -> None:
    try:
        probed = find(name).probe()
    except Exception:
        return  # a probe that raises breaks B1, which is for the suite to say
    if isinstance(probed, Unavailable):
        raise UsageError(f"{flag}: {name} cannot run here: {probed.reason}")


def _check_devices(request: ConformanceRequest) -> None:
    try:
        check_devices(request.backend, request.communicator, request.ranks)
    except UsageError:
        raise
    except Exception:
        return  # as above: the suite says it


def _check_steer(name: str, backend: str) -> None:
    from equipoise.hal.conformance.controlled import ControlledBackend
    from equipoise.hal.conformance.steering import steering

    if isinstance(registry.accelerator(backend), ControlledBackend):
        raise UsageError(f"--steer: every schedule of {backend} is chosen already")
    try:
        steering(name)
    except UsageError as error:
        raise UsageError(f"--steer: {error}") from error


def _conduct(request: ConformanceRequest) -> "Result | None":
    from equipoise.cli.conformance_progress import watcher_for
    from equipoise.hal.conformance.campaign import Campaign

    communicator = request.communicator or registry.accelerator(request.backend).communicator
    campaign = Campaign(
        backend=request.backend,
        communicator=communicator,
        ranks=request.ranks,
        profile=request.profile,
        families=request.only,
        seed=request.seed,
        cases=request.cases,
        steer=request.steer,
    )
    watcher = watcher_for(request.progress)
    try:
        return campaign.run(watcher)
    finally:
        watcher.done()


def _write(request: ConformanceRequest, result: "Result", command: str) -> None:
    from equipoise.demo.machine import describe_machine
    from equipoise.report.clauses_html import render_html

    about = {
        "equipoise": __version__,
        "command": command,
        "machine": describe_machine(),
        "finished": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    written = []
    if request.json is not None:
        text = json.dumps(about | result.to_json(), indent=2, ensure_ascii=False)
        place = write_file(request.json, text + "\n", request.out)
        written.append(f"verdicts: {place}")
    if request.html is not None:
        place = write_file(request.html, render_html(result, about), request.out)
        written.append(f"page: {place}")
    if written and request.progress == "shown":
        print("\n".join(written), file=sys.stderr)
