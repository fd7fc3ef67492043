"""What `equipoise doctor --vllm-ascend` says: whether this vllm-ascend can be served."""

import os
from collections.abc import Iterator

from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.vllm.doctor import Finding, of_plugin, of_symbols, of_version
from equipoise.integrations.vllm_ascend import compatibility


def examine() -> Iterator[Finding]:
    """One finding after the other; imports vllm-ascend, and changes nothing of it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    releases = compatibility.RELEASE, compatibility.BESIDE
    try:
        found = [(release, release.installed()) for release in releases]
    except EngineUnsupported as error:
        yield compatibility.RELEASE.engine, False, str(error)
        return
    for release, version in found:
        yield of_version(release, version)
    yield of_plugin()
    yield of_symbols("worker", compatibility.ENTRY)
    for part, symbols in {**compatibility.PARTS, **compatibility.FRONT}.items():
        yield of_symbols(part, symbols)
    for part, why in compatibility.REFUSED.items():
        yield part, None, why
