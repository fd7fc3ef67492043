"""Our worker over one that is a stand-in: when parts come and go, and what is refused before."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.fakes.fake_vllm import configuration
from helpers.fakes.fake_vllm_ascend import NPUWorker, ascend

from equipoise.hal.errors import ConfigError, EngineUnsupported, IntegrationError
from equipoise.integrations import vllm_ascend
from equipoise.integrations.vllm.compatibility import Release
from equipoise.integrations.vllm.entry import SETTINGS_KEY, SETTINGS_VARIABLE
from equipoise.integrations.vllm.pp import transport
from equipoise.integrations.vllm_ascend import compatibility, eplb_policy
from equipoise.integrations.vllm_ascend.worker import worker_class

BALANCING = {"eplb_config": {"dynamic_eplb": True}}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tested release, whose parts have all that they need."""
    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    monkeypatch.setattr(Release, "installed", lambda release: release.tested_versions[0])
    monkeypatch.setattr(
        compatibility, "FEATURE_SYMBOLS", dict.fromkeys(compatibility.FEATURE_SYMBOLS, ())
    )
    monkeypatch.setattr(
        compatibility, "FRONT_END_SYMBOLS", dict.fromkeys(compatibility.FRONT_END_SYMBOLS, ())
    )
    worker_class.cache_clear()
    with ascend():
        yield
    worker_class.cache_clear()


def worker_with(parts: Any, **parallel: Any) -> Any:
    """A worker whose config enables `parts`."""
    config = configuration({SETTINGS_KEY: parts, **BALANCING}, **parallel)
    return vllm_ascend.Worker(config, 0, 0, "", is_driver_worker=True)


def test_worker_without_settings_behaves_like_its_base() -> None:
    worker = worker_with(None)
    worker.init_device()
    worker.init_worker_extension()
    worker.shutdown()
    assert isinstance(worker, NPUWorker)
    assert worker.done == ["init", "init_device", "shutdown"]


def test_worker_installs_policy_before_and_handover_after_device_init(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    @contextmanager
    def part(name: str, *_: Any) -> Iterator[None]:
        events.append(f"{name} on after {worker.done[-1]}")
        yield
        events.append(f"{name} off after {worker.done[-1]}")

    monkeypatch.setattr(
        eplb_policy, "install_policy", lambda *arguments: part("eplb_policy", *arguments)
    )
    monkeypatch.setattr(
        transport, "install_transport", lambda *arguments: part("pp_transport", *arguments)
    )
    worker = worker_with({"eplb_policy": True, "pp_transport": True}, pipeline_parallel_size=2)
    worker.init_device()
    worker.shutdown()
    assert events == [
        "eplb_policy on after init",
        "pp_transport on after init_device",
        "pp_transport off after init_device",
        "eplb_policy off after init_device",
    ]
    assert worker.done[-1] == "shutdown"


def test_worker_uninstalls_parts_when_device_init_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    @contextmanager
    def part(*_: Any) -> Iterator[None]:
        events.append("on")
        try:
            yield
        finally:
            events.append("off")

    def fails(self: Any) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(eplb_policy, "install_policy", part)
    monkeypatch.setattr(NPUWorker, "init_device", fails)
    worker = worker_with({"eplb_policy": True})
    with pytest.raises(RuntimeError, match="no device"):
        worker.init_device()
    assert events == ["on", "off"]


@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        ({"eplb": True}, EngineUnsupported, "eplb: vllm-ascend moves experts by itself"),
        ({"pp_transport": True}, IntegrationError, "--pipeline-parallel-size of at least 2"),
        ({"polici": True}, ConfigError, "unknown polici"),
    ],
)
def test_worker_refuses_unsupported_parts_before_base_init(
    parts: Any, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begins(*_: Any, **__: Any) -> None:
        raise AssertionError("it began")

    monkeypatch.setattr(compatibility, "WORKER_SYMBOLS", ())
    monkeypatch.setattr(NPUWorker, "__init__", begins)
    with pytest.raises(kind, match=message):
        worker_with(parts)


def test_worker_refuses_base_with_changed_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NPUWorker, "init_device", lambda self, device: None)
    with pytest.raises(EngineUnsupported, match=r"NPUWorker.init_device has the signature \(self"):
        worker_with({"eplb_policy": True})


def test_worker_refuses_untested_release_unless_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Release, "installed", lambda _: "0.30.0")
    with pytest.raises(
        EngineUnsupported, match=r"0\.30\.0 was not tested.*its vLLM: version 0\.30"
    ):
        worker_with({"eplb_policy": True})
    monkeypatch.setenv(compatibility.RELEASE.accept_variable, "0.30.0")
    monkeypatch.setenv(compatibility.VLLM_RELEASE.accept_variable, "0.30.0")
    assert worker_with({"eplb_policy": True}).done == ["init"]


def test_worker_takes_post_release_of_tested_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Release, "installed", lambda _: "0.23.0.post1")
    assert worker_with({"eplb_policy": True}).done == ["init"]
    monkeypatch.setattr(Release, "installed", lambda _: "0.23.0rc1")
    with pytest.raises(EngineUnsupported, match=r"0\.23\.0rc1 was not tested"):
        worker_with({"eplb_policy": True})


def test_worker_import_failure_is_engine_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_ascend.worker.worker", None)
    with pytest.raises(EngineUnsupported, match="worker cannot be imported"):
        _ = vllm_ascend.Worker


def test_worker_counters_include_counts_of_its_planner() -> None:
    worker = worker_with({"eplb_policy": True})
    before = worker.equipoise_counters()
    worker.equipoise_policy_counters.add("eplb_policy_moved_slots", 5)
    assert worker.equipoise_counters() == {
        **before,
        "eplb_policy_moved_slots": before["eplb_policy_moved_slots"] + 5,
    }


@pytest.mark.slow
def test_vllm_ascend_module_imports_no_engine_before_worker() -> None:
    code = (
        "import sys; import equipoise.integrations.vllm_ascend as ours; ours.prepare; "
        "print([name for name in sys.modules if name.startswith(('vllm', 'torch_npu'))])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert completed.stdout.strip() == "[]"
