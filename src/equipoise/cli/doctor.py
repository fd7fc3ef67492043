"""`equipoise doctor`."""

import json
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path

from equipoise import __version__
from equipoise.cli import engines
from equipoise.cli.checks import Check
from equipoise.cli.files import write_file
from equipoise.cli.findings import Findings, Found, examine, in_words
from equipoise.cli.validation import check_file

INDENT = 32
WIDTH = 80


def doctor(arguments: Namespace) -> int:
    """Print what was found; returns 0 if at least one accelerator works, 1 otherwise.

    With an engine's name, what was found of that engine instead, as `_engines` says.

    Raises UsageError for a `--json` that cannot be written.
    """
    if arguments.json is not None:
        check_file("--json", arguments.json)
    if named := engines.asked(arguments):
        return _engines(named, arguments.json)
    findings = examine()
    if arguments.json is not None:
        write_file(arguments.json, json.dumps(findings.to_json(), indent=2) + "\n")
    print(describe(findings))
    return findings.exit_code


def _engines(named: tuple[str, ...], json_file: Path | None) -> int:
    """What is found of serving engines; 0 if all that can be had is as it must be, 1 otherwise."""
    found = {name: engines.examine(name) for name in named}
    if json_file is not None:
        engines.write(json_file, found)
    for name, checks in found.items():
        print("\n".join([f"equipoise {__version__}", *_section(name, map(_check, checks))]))
    seen = {check.passed for checks in found.values() for check in checks}
    every = "every part that can be had" if None in seen else "every part"
    print(
        "\nsome of it is missing: see above" if False in seen else f"\n{every} can be switched on"
    )
    return 1 if False in seen else 0


def describe(findings: Findings) -> str:
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
    from equipoise.cli.memory import words

    return _section(
        "memory of `equipoise run`, per rank, with default options",
        (_line(purpose, words(count)) for purpose, count in memory.items()),
    )


def _section(title: str, lines: Iterable[str]) -> list[str]:
    return ["", title, *(list(lines) or ["  none installed"])]


def _backends(found: Iterable[Found]) -> Iterable[str]:
    for backend in found:
        yield _line(backend.name, f"{'works' if backend.works else 'no'}: {backend.detail}")
        if backend.devices is not None:
            yield _line("  devices", str(backend.devices))
        if backend.capabilities is None:
            yield _line("  capabilities", "unknown")
            continue
        for name, value in backend.capabilities.items():
            yield _line("  " + name.replace("_", " "), in_words(value))


def _check(check: Check) -> str:
    before = {True: "", False: "MISSING: ", None: "not to be had: "}[check.passed]
    return _line(check.name, before + check.detail)


def _line(name: str, value: str) -> str:
    margin = " " * (2 + INDENT)
    return textwrap.fill(
        value, WIDTH, initial_indent=f"  {name:<{INDENT}}", subsequent_indent=margin
    )


def _verdict(findings: Findings) -> str:
    working = [found.name for found in findings.accelerators if found.works]
    if not working:
        return "no accelerator works: see the reasons above"
    return f"ready: equipoise run --backend {working[0]}"
