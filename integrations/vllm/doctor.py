"""What `equipoise doctor --vllm` says: whether this vLLM can be served, part by part."""

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points

from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.vllm import compatibility
from equipoise.integrations.vllm.compatibility import Release, Symbol, problems
from equipoise.integrations.vllm.entry import PLUGIN

GROUP = "vllm.general_plugins"
CHOICE = "VLLM_PLUGINS"
"""In the environment: the plugins that vLLM loads; all of them where it is unset."""
NAME = "equipoise"
Finding = tuple[str, bool | None, str]
"""What was looked at, whether it is so, and what was seen or would help; None where this engine has
no place for it, whatever is done."""


def examine() -> Iterator[Finding]:
    """One finding after the other; imports vLLM, and changes nothing of it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        found = compatibility.installed()
    except EngineUnsupported as error:
        yield "vLLM", False, str(error)
        return
    yield of_version(compatibility.RELEASE, found)
    yield of_plugin()
    yield of_symbols("hooks", compatibility.ENTRY)
    for part, symbols in compatibility.PARTS.items():
        yield of_symbols(part, symbols)


def of_version(release: Release, found: str) -> Finding:
    """Whether a version was tested, or is taken all the same."""
    if found in release.tested:
        return release.engine, True, f"{found}, which was tested"
    if os.environ.get(release.untested) == found:
        return release.engine, True, f"{found}, not tested, taken by {release.untested}"
    return release.engine, False, f"{found} was not tested; tested: {', '.join(release.tested)}"


def of_plugin() -> Finding:
    """Whether vLLM will find the plugin."""
    points = entry_points(group=GROUP, name=NAME)
    if not points:
        return "plugin", False, "vLLM does not see it: install equipoise beside vLLM"
    chosen = os.environ.get(CHOICE)
    if chosen is not None and NAME not in chosen.split(","):
        return "plugin", False, f"{CHOICE}={chosen} leaves it out"
    try:
        for point in points:
            point.load()
        import_module(PLUGIN)
    except Exception as error:
        return "plugin", False, f"found by vLLM, and cannot be imported: {error!r}"
    return "plugin", True, "found by vLLM"


def of_symbols(what: str, symbols: tuple[Symbol, ...]) -> Finding:
    """Whether everything that a part touches is as it must be."""
    wrong = problems(symbols)
    if wrong:
        return what, False, "; ".join(wrong)
    return what, True, f"all {len(symbols)} symbols are there, with their signatures"
