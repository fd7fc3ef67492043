"""What `equipoise doctor` finds out, without opening a device."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from equipoise import install_command
from equipoise.cli.checks import Check
from equipoise.cli.import_errors import explain_import_error
from equipoise.demo.settings import RunSettings
from equipoise.hal import registry
from equipoise.hal.errors import BackendUnavailable, EquipoiseError

if TYPE_CHECKING:
    from equipoise.hal.capabilities import Probe

TORCH = "torch"
CHECKED_PACKAGES = (TORCH, "numpy", "safetensors", "matplotlib", "prometheus_client")
NO_TORCH = "torch does not import: see it below `checks`"
EXTRAS = {"matplotlib": "plots", "prometheus_client": "serve"}
"""What brings a package that is optional."""


class Probed(Protocol):
    """What accelerator and communicator backends have in common."""

    @property
    def capabilities(self) -> Any:
        """A frozen dataclass, readable before anything is opened."""
        ...

    def probe(self) -> "Probe":
        """Whether it can run here."""
        ...


@dataclass(frozen=True)
class Found:
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
class Findings:
    """All of it; `demo_memory` is empty where torch does not import."""

    version: str
    accelerators: tuple[Found, ...]
    communicators: tuple[Found, ...]
    checks: tuple[Check, ...]
    machine: dict[str, str]
    demo_memory: dict[str, int | None]

    @property
    def exit_code(self) -> int:
        """0 if at least one accelerator works."""
        return 0 if any(found.works for found in self.accelerators) else 1

    def to_json(self) -> dict[str, object]:
        """Plain lists, numbers and strings."""
        return asdict(self)


def examine() -> Findings:
    """Look at everything that is installed; what is broken becomes a finding, not an error."""
    from equipoise import __version__
    from equipoise.demo.machine import describe_machine

    broken = _torch_problem()
    packages = (_package(name) for name in CHECKED_PACKAGES if name != TORCH)
    return Findings(
        version=__version__,
        accelerators=_each(registry.ACCELERATORS, registry.accelerator, broken),
        communicators=_each(registry.COMMUNICATORS, registry.communicator, broken),
        checks=(_torch(broken), *packages, _native_core(), _invariance(broken)),
        machine=describe_machine(),
        demo_memory={} if broken else _demo_memory(),
    )


def look_at(name: str, find: Callable[[str], Probed]) -> Found:
    """One backend by name; one that does not import or probe says so."""
    from equipoise.hal.accelerator import Backend
    from equipoise.hal.capabilities import Available

    try:
        backend = find(name)
        probed = backend.probe()
        devices = backend.devices() if isinstance(backend, Backend) else None
    except (BackendUnavailable, OSError, RuntimeError) as error:
        return Found(name, works=False, detail=str(error))
    if not isinstance(probed, Available):
        return Found(name, works=False, detail=probed.reason)
    declared = {key: plain(value) for key, value in vars(backend.capabilities).items()}
    return Found(name, True, probed.detail, declared, devices)


def plain(value: object) -> object:
    """A capability's value as JSON has it: a bool, a number, a string, or a sorted list of them."""
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, frozenset):
        return sorted(str(plain(item)) for item in value)
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).removeprefix("torch.")


def in_words(value: object) -> str:
    """A plain value for people: yes, no, a number, or a list."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _each(group: str, find: Callable[[str], Probed], broken: str | None) -> tuple[Found, ...]:
    """Every backend needs torch: where that is `broken`, none of them is looked at."""
    if broken is not None:
        return tuple(Found(name, works=False, detail=NO_TORCH) for name in registry.names(group))
    return tuple(look_at(name, find) for name in registry.names(group))


def _torch_problem() -> str | None:
    """Why torch does not import; None where it does."""
    try:
        found = import_module(TORCH)
    except (ImportError, OSError) as error:
        return explain_import_error(error)
    if hasattr(found, "Tensor"):
        return None
    # What an uninstall leaves behind imports as an empty package.
    where = found.__file__ or next(iter(found.__path__))
    return f"torch is not whole: {where} has no Tensor; install it again"


def _torch(broken: str | None) -> Check:
    return _package(TORCH) if broken is None else Check(TORCH, False, broken)


def _demo_memory() -> dict[str, int | None]:
    from equipoise.cli.memory import demo_memory

    return demo_memory(RunSettings())


def _package(name: str) -> Check:
    try:
        return Check(name, True, metadata.version(name))
    except metadata.PackageNotFoundError:
        how = install_command(EXTRAS[name]) if name in EXTRAS else f"pip install {name}"
        return Check(name, False, f"not installed: {how}")


def _native_core() -> Check:
    try:
        core = import_module("equipoise._native")
    except ImportError as error:
        return Check("native core", False, f"does not import: {error}")
    return Check("native core", True, _compiler_of(Path(str(core.__file__))))


def _compiler_of(library: Path) -> str:
    """What compilers leave in the `.comment` section: the longest line that starts as theirs do."""
    text = library.read_bytes()
    starts = (b"GCC: (", b"clang version ", b"Ubuntu clang version ", b"Debian clang version ")
    lines = [_line_at(text, text.find(start)) for start in starts if start in text]
    return max(lines, key=len, default="compiler unknown")


def _line_at(text: bytes, offset: int) -> str:
    return text[offset : text.index(b"\0", offset)].decode("ascii", "replace")


def _invariance(broken: str | None) -> Check:
    """Whether the demo's oracle holds on this processor: bits must not depend on the batch."""
    if broken is not None:
        return Check("batch invariance", False, f"unknown: {NO_TORCH}")
    import torch

    from equipoise.demo.model.config import ModelConfig
    from equipoise.demo.model.invariance import check_batch_invariance

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check_batch_invariance(ModelConfig())
    except EquipoiseError as error:
        return Check("batch invariance", False, str(error))
    finally:
        torch.set_num_threads(threads)
    return Check("batch invariance", True, "a row's bits do not depend on its batch")
