"""What `equipoise doctor --vllm` says: whether this vLLM can be served, part by part."""

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points

from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.vllm import compatibility
from equipoise.integrations.vllm.compatibility import Release, Symbol, symbol_problems
from equipoise.integrations.vllm.entry import PLUGIN

PLUGIN_GROUP = "vllm.general_plugins"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
"""In the environment: the plugins that vLLM loads; all of them where it is unset."""
PLUGIN_NAME = "equipoise"
Finding = tuple[str, bool | None, str]
"""What was looked at, whether it is so, and what was seen or would help; None where this engine has
no place for it, whatever is done."""


def examine() -> Iterator[Finding]:
    """One finding after the other; imports vLLM, and changes nothing of it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        installed = compatibility.installed()
    except EngineUnsupported as error:
        yield "vLLM", False, str(error)
        return
    yield version_finding(compatibility.RELEASE, installed)
    yield plugin_finding()
    yield symbols_finding("hooks", compatibility.HOOK_SYMBOLS)
    for part, symbols in compatibility.FEATURE_SYMBOLS.items():
        yield symbols_finding(part, symbols)


def version_finding(release: Release, installed: str) -> Finding:
    """Whether a version was tested, or is taken all the same."""
    if installed in release.tested_versions:
        return release.engine, True, f"{installed}, which was tested"
    if os.environ.get(release.accept_variable) == installed:
        return (
            release.engine,
            True,
            f"{installed}, not tested, taken by {release.accept_variable}",
        )
    return (
        release.engine,
        False,
        f"{installed} was not tested; tested: {', '.join(release.tested_versions)}",
    )


def plugin_finding() -> Finding:
    """Whether vLLM will find the plugin."""
    points = entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)
    if not points:
        return "plugin", False, "vLLM does not see it: install equipoise beside vLLM"
    enabled_plugins = os.environ.get(PLUGINS_VARIABLE)
    if enabled_plugins is not None and PLUGIN_NAME not in enabled_plugins.split(","):
        return "plugin", False, f"{PLUGINS_VARIABLE}={enabled_plugins} leaves it out"
    try:
        for point in points:
            point.load()
        import_module(PLUGIN)
    except Exception as error:
        return "plugin", False, f"found by vLLM, and cannot be imported: {error!r}"
    return "plugin", True, "found by vLLM"


def symbols_finding(feature: str, symbols: tuple[Symbol, ...]) -> Finding:
    """Whether everything that a part touches is as it must be."""
    problems = symbol_problems(symbols)
    if problems:
        return feature, False, "; ".join(problems)
    return feature, True, f"all {len(symbols)} symbols are there, with their signatures"
