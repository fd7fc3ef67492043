"""Checks of `equipoise doctor --sglang`: whether this SGLang is supported."""

import os
from collections.abc import Iterator
from importlib.metadata import entry_points

from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.sglang import compatibility
from equipoise.integrations.vllm.doctor import Finding, symbols_finding, version_finding

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGINS_VARIABLE = "SGLANG_PLUGINS"
"""Environment variable with the plugins that SGLang loads; unset: all of them."""
PLUGIN_NAME = "equipoise"


def examine() -> Iterator[Finding]:
    """Yield the findings; imports SGLang and changes nothing in it."""
    try:
        installed = compatibility.RELEASE.installed()
    except EngineUnsupported as error:
        yield "SGLang", False, str(error)
        return
    yield version_finding(compatibility.RELEASE, installed)
    yield plugin_finding()
    yield symbols_finding("eplb_policy", compatibility.SYMBOLS)
    yield symbols_finding("dispatch local", compatibility.LOCAL_DISPATCH_SYMBOLS)


def plugin_finding() -> Finding:
    """Whether SGLang finds the plugin."""
    if not entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME):
        return "plugin", False, "SGLang does not see it: install equipoise in SGLang's environment"
    enabled = os.environ.get(PLUGINS_VARIABLE, "")
    if enabled and PLUGIN_NAME not in [name.strip() for name in enabled.split(",")]:
        return "plugin", False, f"{PLUGINS_VARIABLE}={enabled} leaves it out"
    return "plugin", True, "found by SGLang"
