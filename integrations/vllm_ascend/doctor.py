"""Checks of `equipoise doctor --vllm-ascend`: whether this vllm-ascend is supported."""

import os
from collections.abc import Iterator

from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.vllm.doctor import (
    Finding,
    plugin_finding,
    symbols_finding,
    version_finding,
)
from equipoise.integrations.vllm_ascend import compatibility


def examine() -> Iterator[Finding]:
    """Yield the findings; imports vllm-ascend and changes nothing in it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    releases = compatibility.RELEASE, compatibility.VLLM_RELEASE
    try:
        release_versions = [(release, release.installed()) for release in releases]
    except EngineUnsupported as error:
        yield compatibility.RELEASE.engine, False, str(error)
        return
    for release, version in release_versions:
        yield version_finding(release, version)
    yield plugin_finding()
    yield symbols_finding("worker", compatibility.WORKER_SYMBOLS)
    for feature, symbols in {
        **compatibility.FEATURE_SYMBOLS,
        **compatibility.FRONT_END_SYMBOLS,
    }.items():
        yield symbols_finding(feature, symbols)
    for feature, why in compatibility.UNSUPPORTED_FEATURES.items():
        yield feature, None, why
