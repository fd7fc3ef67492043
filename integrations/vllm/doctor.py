"""Checks of `equipoise doctor --vllm`: whether this vLLM is supported, feature by feature."""

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
"""Environment variable with the plugins that vLLM loads; unset: all of them."""
PLUGIN_NAME = "equipoise"
Finding = tuple[str, bool | None, str]
"""What was checked, whether it is all right, and details. None instead of a verdict: this engine
cannot have the feature at all."""


def examine() -> Iterator[Finding]:
    """Yield the findings; imports vLLM and changes nothing in it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        installed = compatibility.installed()
    except EngineUnsupported as error:
        yield "vLLM", False, str(error)
        return
    yield version_finding(compatibility.RELEASE, installed)
    yield plugin_finding()
    yield symbols_finding("hooks", compatibility.HOOK_SYMBOLS)
    for feature, symbols in compatibility.FEATURE_SYMBOLS.items():
        yield symbols_finding(feature, symbols)


def version_finding(release: Release, installed: str) -> Finding:
    """Whether a version was tested or is accepted."""
    if release.is_tested(installed):
        what = "which" if installed in release.tested_versions else "a post-release of one that"
        return release.engine, True, f"{installed}, {what} was tested"
    if os.environ.get(release.accept_variable) == installed:
        return (
            release.engine,
            True,
            f"{installed}, not tested, accepted by {release.accept_variable}",
        )
    return (
        release.engine,
        False,
        f"{installed} was not tested; tested: {', '.join(release.tested_versions)}; "
        f"{release.accept_variable}={installed} accepts it",
    )


def plugin_finding() -> Finding:
    """Whether vLLM finds the plugin."""
    points = entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)
    if not points:
        return "plugin", False, "vLLM does not see it: install equipoise in vLLM's environment"
    enabled_plugins = os.environ.get(PLUGINS_VARIABLE)
    if enabled_plugins is not None and PLUGIN_NAME not in enabled_plugins.split(","):
        return "plugin", False, f"{PLUGINS_VARIABLE}={enabled_plugins} leaves it out"
    try:
        for point in points:
            point.load()
        import_module(PLUGIN)
    except Exception as error:
        return "plugin", False, f"found by vLLM, but cannot be imported: {error!r}"
    return "plugin", True, "found by vLLM"


def symbols_finding(feature: str, symbols: tuple[Symbol, ...]) -> Finding:
    """Whether all symbols that a feature uses are as expected."""
    problems = symbol_problems(symbols)
    if problems:
        return feature, False, "; ".join(problems)
    return feature, True, f"all {len(symbols)} symbols are there, with their signatures"
