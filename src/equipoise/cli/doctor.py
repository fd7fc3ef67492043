"""`equipoise doctor`: collects what this machine has and prints it, without opening a device."""

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from equipoise import __version__, install_command
from equipoise.cli import engines
from equipoise.cli.command import Command
from equipoise.cli.engines import DoctorCheck
from equipoise.cli.files import write_file
from equipoise.cli.import_errors import explain_import_error
from equipoise.cli.option_checks import check_file
from equipoise.cli.process import print_stderr
from equipoise.demo.settings import RunSettings
from equipoise.hal import registry
from equipoise.hal.errors import BackendUnavailable, EquipoiseError
from equipoise.option import OUTPUT, Option, options_of

if TYPE_CHECKING:
    from equipoise.hal.capabilities import Probe

TORCH = "torch"
CHECKED_PACKAGES = (
    *(TORCH, "numpy", "safetensors", "matplotlib", "prometheus_client"),
    *("grpcio", "xds-protos"),
)
NO_TORCH = "torch does not import: see `checks` below"
HOST_BACKENDS = ("cpu", "host", "virtual")
"""Accelerators that need no device."""
EXTRAS = {
    "matplotlib": "plots",
    "prometheus_client": "serve",
    "grpcio": "picker",
    "xds-protos": "picker",
}
"""What brings a package that is optional."""


class ProbedBackend(Protocol):
    """What accelerator and communicator backends have in common."""

    @property
    def capabilities(self) -> Any:
        """A frozen dataclass, readable before anything is opened."""
        ...

    def probe(self) -> "Probe":
        """Whether it can run here."""
        ...


@dataclass(frozen=True)
class BackendFinding:
    """One backend: whether it works, on what or why not, and what it declares.

    Attributes:
        capabilities: bools, numbers, strings and sorted lists of strings by name; None where it
            does not work: what it declares may depend on the device that is missing.
        devices: how many an accelerator can open; None for a communicator, and where nothing
            works.
    """

    name: str
    works: bool
    detail: str
    capabilities: dict[str, object] | None = None
    devices: int | None = None


@dataclass(frozen=True)
class DoctorFindings:
    """All of it; `demo_memory` is empty where torch does not import."""

    version: str
    accelerators: tuple[BackendFinding, ...]
    communicators: tuple[BackendFinding, ...]
    checks: tuple[DoctorCheck, ...]
    machine: dict[str, str]
    demo_memory: dict[str, int | None]

    @property
    def exit_code(self) -> int:
        """0 if at least one accelerator works."""
        return 0 if any(backend.works for backend in self.accelerators) else 1

    def to_json(self) -> dict[str, object]:
        """Plain lists, numbers and strings."""
        return asdict(self)


def collect_findings() -> DoctorFindings:
    """Look at everything that is installed; what is broken becomes a finding, not an error."""
    from equipoise import __version__
    from equipoise.machine import describe_machine

    broken = _torch_problem()
    packages = (_package(name) for name in CHECKED_PACKAGES if name != TORCH)
    return DoctorFindings(
        version=__version__,
        accelerators=_each(registry.ACCELERATORS, registry.accelerator, broken),
        communicators=_each(registry.COMMUNICATORS, registry.communicator, broken),
        checks=(_torch(broken), *packages, _native_core(), _invariance(broken)),
        machine=describe_machine(),
        demo_memory={} if broken else _demo_memory(),
    )


def probe_backend(name: str, find: Callable[[str], ProbedBackend]) -> BackendFinding:
    """One backend by name; one that does not import or probe says so."""
    from equipoise.hal.accelerator import Backend
    from equipoise.hal.capabilities import Available

    try:
        backend = find(name)
        probed = backend.probe()
        devices = backend.devices() if isinstance(backend, Backend) else None
    except (BackendUnavailable, OSError, RuntimeError) as error:
        return BackendFinding(name, works=False, detail=str(error))
    if not isinstance(probed, Available):
        return BackendFinding(name, works=False, detail=probed.reason)
    declared = {key: json_value(value) for key, value in vars(backend.capabilities).items()}
    return BackendFinding(name, True, probed.detail, declared, devices)


def json_value(value: object) -> object:
    """A capability's value as JSON has it: a bool, a number, a string, or a sorted list of them."""
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, frozenset):
        return sorted(str(json_value(item)) for item in value)
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).removeprefix("torch.")


def describe_value(value: object) -> str:
    """A plain value for people: yes, no, a number, or a list."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _each(
    group: str, find: Callable[[str], ProbedBackend], broken: str | None
) -> tuple[BackendFinding, ...]:
    """Every backend needs torch: where that is `broken`, none of them is looked at."""
    if broken is not None:
        return tuple(
            BackendFinding(name, works=False, detail=NO_TORCH) for name in registry.names(group)
        )
    return tuple(probe_backend(name, find) for name in registry.names(group))


def _torch_problem() -> str | None:
    """Why torch does not import; None where it does."""
    try:
        module = import_module(TORCH)
    except (ImportError, OSError) as error:
        return explain_import_error(error)
    if hasattr(module, "Tensor"):
        return None
    # What an uninstall leaves behind imports as an empty package.
    where = module.__file__ or next(iter(module.__path__))
    return f"torch is not whole: {where} has no Tensor; install it again"


def _torch(broken: str | None) -> DoctorCheck:
    return _package(TORCH) if broken is None else DoctorCheck(TORCH, False, broken)


def _demo_memory() -> dict[str, int | None]:
    from equipoise.cli.memory_report import demo_memory

    return demo_memory(RunSettings())


def _package(name: str) -> DoctorCheck:
    try:
        return DoctorCheck(name, True, metadata.version(name))
    except metadata.PackageNotFoundError:
        how = install_command(EXTRAS[name]) if name in EXTRAS else f"pip install {name}"
        return DoctorCheck(name, False, f"not installed: {how}")


def _native_core() -> DoctorCheck:
    try:
        core = import_module("equipoise._native")
    except ImportError as error:
        return DoctorCheck("native core", False, f"does not import: {error}")
    return DoctorCheck("native core", True, _compiler_of(Path(str(core.__file__))))


def _compiler_of(library: Path) -> str:
    """What compilers leave in the `.comment` section: the longest line that starts as theirs do."""
    text = library.read_bytes()
    starts = (b"GCC: (", b"clang version ", b"Ubuntu clang version ", b"Debian clang version ")
    lines = [_line_at(text, text.find(start)) for start in starts if start in text]
    return max(lines, key=len, default="compiler unknown")


def _line_at(text: bytes, offset: int) -> str:
    return text[offset : text.index(b"\0", offset)].decode("ascii", "replace")


def _invariance(broken: str | None) -> DoctorCheck:
    """Whether the demo's oracle holds on this processor: bits must not depend on the batch."""
    if broken is not None:
        return DoctorCheck("batch invariance", False, "unknown without torch")
    import torch

    from equipoise.demo.model.config import ModelConfig
    from equipoise.demo.model.invariance import check_batch_invariance

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check_batch_invariance(ModelConfig())
    except EquipoiseError as error:
        return DoctorCheck("batch invariance", False, str(error))
    finally:
        torch.set_num_threads(threads)
    return DoctorCheck("batch invariance", True, "a row's bits do not depend on its batch")


DOCTOR = """\
Say what was found on this machine, what is missing and why. Exit code 0 if an
accelerator works; with the name of an engine, if every part of it that can be had
can be switched on; 1 otherwise."""
INDENT = 32
WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """What one `equipoise doctor` was asked for; `engine_names` instead of the machine."""

    json: Annotated[Path | None, Option("write the findings there too", OUTPUT)] = None
    engine_names: tuple[str, ...] = ()


def _request_of(line: Mapping[str, Any], _: Mapping[str, Any]) -> DoctorRequest:
    names = tuple(name for name in engines.installed() if name in line)
    return DoctorRequest(json=line.get("json"), engine_names=names)


def doctor(request: DoctorRequest, command: str = "") -> int:
    """Print what was found; returns 0 if at least one accelerator works, 1 otherwise.

    With an engine's name, what was found of that engine instead, as `_engines` says.

    Raises UsageError for a `--json` that cannot be written.
    """
    if request.json is not None:
        check_file("--json", request.json)
    if request.engine_names:
        return _engines(request.engine_names, request.json)
    findings = collect_findings()
    if request.json is not None:
        place = write_file(request.json, json.dumps(findings.to_json(), indent=2) + "\n")
        print_stderr(f"findings: {place}")
    print(render_findings(findings))
    return findings.exit_code


def _engines(engine_names: tuple[str, ...], json_file: Path | None) -> int:
    """What is found of serving engines; 0 if all that can be had is as it must be, 1 otherwise."""
    findings = {name: engines.examine(name) for name in engine_names}
    if json_file is not None:
        engines.write(json_file, findings)
    for name, checks in findings.items():
        print("\n".join([f"equipoise {__version__}", *_section(name, map(_check, checks))]))
    results = {check.passed for checks in findings.values() for check in checks}
    every = "every part that can be had" if None in results else "every part"
    print(
        "\nsome checks failed: their lines say what to install or change"
        if False in results
        else f"\n{every} can be switched on"
    )
    return 1 if False in results else 0


def render_findings(findings: DoctorFindings) -> str:
    """All findings as lines of text."""
    lines = [
        f"equipoise {findings.version}",
        *_section("machine", (_line(k, v) for k, v in findings.machine.items())),
        *_section("accelerators", _backends(findings.accelerators)),
        *_section("communicators", _backends(findings.communicators)),
        *_section("checks", (_check(check) for check in findings.checks)),
        *_memory(findings.demo_memory),
        "",
        _verdict(findings),
    ]
    return "\n".join(lines)


def _memory(memory: Mapping[str, int | None]) -> list[str]:
    if not memory:
        return []
    from equipoise.cli.memory_report import bytes_or_unknown

    return _section(
        "memory of `equipoise run`, per rank, with default options",
        (_line(purpose, bytes_or_unknown(count)) for purpose, count in memory.items()),
    )


def _section(title: str, lines: Iterable[str]) -> list[str]:
    return ["", title, *(list(lines) or ["  none installed"])]


def _backends(findings: Iterable[BackendFinding]) -> Iterable[str]:
    for backend in findings:
        yield _line(backend.name, f"{'works' if backend.works else 'no'}: {backend.detail}")
        if backend.devices is not None:
            yield _line("  devices", str(backend.devices))
        if backend.capabilities is None:
            yield _line("  capabilities", "unknown")
            continue
        for name, value in backend.capabilities.items():
            yield _line("  " + name.replace("_", " "), describe_value(value))


def _check(check: DoctorCheck) -> str:
    before = {True: "", False: "MISSING: ", None: "not to be had: "}[check.passed]
    return _line(check.name, before + check.detail)


def _line(name: str, value: str) -> str:
    margin = " " * (2 + INDENT)
    return textwrap.fill(
        value, WIDTH, initial_indent=f"  {name:<{INDENT}}", subsequent_indent=margin
    )


def _verdict(findings: DoctorFindings) -> str:
    working = [backend for backend in findings.accelerators if backend.works]
    if not working:
        verdict = "no accelerator works: see the reasons above"
        if any(check.name == TORCH and not check.passed for check in findings.checks):
            return f"planner, reports, simulator, proxy and picker work without torch\n{verdict}"
        return verdict
    # A device, where one works: the others run anywhere.
    best = min(working, key=lambda backend: backend.name in HOST_BACKENDS)
    command = f"equipoise run --backend {best.name}"
    if best.name not in HOST_BACKENDS and (best.devices or 0) < RunSettings().ranks:
        command += f" --ranks {best.devices}"  # a rank takes a device
    return f"ready: {command}"


COMMAND = Command(
    DoctorRequest,
    doctor,
    description=DOCTOR,
    options=lambda: engines.options() | options_of(DoctorRequest),
    has_file=False,
    request_of=_request_of,
)
