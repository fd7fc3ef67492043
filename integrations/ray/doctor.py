"""Checks of `equipoise doctor --ray`: whether this Ray is supported."""

from collections.abc import Iterator

from equipoise import install_command
from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.ray import compatibility
from equipoise.integrations.vllm.doctor import Finding, symbols_finding, version_finding


def examine() -> Iterator[Finding]:
    """Yield the findings; imports Ray Serve and starts nothing of it."""
    try:
        installed = compatibility.RELEASE.installed()
    except EngineUnsupported as error:
        yield "Ray", False, f"{error}, by {install_command('ray')}"
        return
    yield version_finding(compatibility.RELEASE, installed)
    yield symbols_finding("request router", compatibility.SYMBOLS)
