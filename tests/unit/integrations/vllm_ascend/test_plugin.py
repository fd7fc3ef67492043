"""vllm-ascend from the front end: what the plugin looks at, and what it says."""

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fakes.fake_vllm import configuration

from equipoise.hal.errors import EngineUnsupported, IntegrationError
from equipoise.integrations.vllm import plugin
from equipoise.integrations.vllm.compatibility import Release
from equipoise.integrations.vllm.entry import SETTINGS_KEY, SETTINGS_VARIABLE
from equipoise.integrations.vllm.settings import parse_settings
from equipoise.integrations.vllm_ascend import compatibility, doctor

WORKER = "equipoise.integrations.vllm_ascend.Worker"
BALANCING = {"eplb_config": {"dynamic_eplb": True}}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tested release, whose front end has all that a part needs."""
    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    monkeypatch.setattr(Release, "installed", lambda release: release.tested_versions[0])
    monkeypatch.setattr(
        compatibility, "FRONT_END_SYMBOLS", dict.fromkeys(compatibility.FRONT_END_SYMBOLS, ())
    )


def prepared_config(parts: Any, additional: Any = BALANCING, **parallel: Any) -> Any:
    """The configuration, as the plugin leaves it."""
    config = configuration(
        {SETTINGS_KEY: parts, **additional}, **{"worker_cls": WORKER, **parallel}
    )
    settings = parse_settings(config.additional_config, {})
    assert settings is not None
    plugin.prepare(config, settings)
    return config


def test_plugin_with_ascend_worker_sets_no_extension() -> None:
    assert prepared_config({"eplb_policy": True}).parallel_config.worker_extension_cls == ""


def test_plugin_refuses_stock_ascend_worker_and_names_flag() -> None:
    theirs = "vllm_ascend.worker.worker.NPUWorker"
    with pytest.raises(IntegrationError, match=f"--worker-cls {WORKER}: not {theirs}"):
        prepared_config({"eplb_policy": True}, worker_cls=theirs)


@pytest.mark.parametrize(
    ("parts", "additional", "message"),
    [
        ({"eplb_policy": True}, {}, "dynamic_eplb"),
        ({"eplb_policy": True}, {"eplb_config": {"dynamic_eplb": False}}, "DYNAMIC_EPLB=true"),
        ({"pp_transport": True}, {}, "--pipeline-parallel-size of at least 2"),
        ({"eplb_policy": True}, {**BALANCING, "xlite_graph_config": {"enabled": True}}, "xlite"),
        ({"dp_load_balancer": True}, {}, "--data-parallel-size of at least 2"),
    ],
)
def test_plugin_refuses_part_that_would_have_no_effect(
    parts: Any, additional: Any, message: str
) -> None:
    with pytest.raises(IntegrationError, match=message):
        prepared_config(parts, additional)


@pytest.mark.parametrize("switch", ["key", "variable", "eagle3"])
def test_plugin_refuses_handover_of_rows_or_tensors_that_no_stage_announces(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    additional: Any = {"enable_flashcomm1": True} if switch == "key" else {}
    if switch == "variable":
        monkeypatch.setenv("VLLM_ASCEND_ENABLE_FLASHCOMM1", "1")
    config = configuration(
        {SETTINGS_KEY: {"pp_transport": True}, **additional},
        worker_cls=WORKER,
        pipeline_parallel_size=2,
    )
    if switch == "eagle3":
        config.speculative_config = SimpleNamespace(method="eagle3")
    settings = parse_settings(config.additional_config, {})
    assert settings is not None
    with pytest.raises(IntegrationError, match="eagle3" if switch == "eagle3" else "flashcomm1"):
        plugin.prepare(config, settings)


@pytest.mark.parametrize(
    ("additional", "parallel"),
    [
        (BALANCING, {}),
        ({"eplb_config": {"expert_map_record_path": "map.json"}}, {}),
        ({}, {"enable_eplb": True}),
    ],
)
def test_plugin_accepts_policy_when_expert_balancing_is_on(additional: Any, parallel: Any) -> None:
    config = prepared_config({"eplb_policy": True}, additional, **parallel)
    assert config.additional_config[SETTINGS_KEY] == {"eplb_policy": True}


def test_plugin_refuses_engine_part_with_reason() -> None:
    with pytest.raises(EngineUnsupported, match="eplb: vllm-ascend moves experts by itself"):
        prepared_config({"eplb": True})


def test_doctor_reports_versions_missing_symbols_and_refused_parts() -> None:
    results = {what: (so, detail) for what, so, detail in doctor.examine()}
    assert results["vllm-ascend"] == (True, "0.23.0, which was tested")
    assert results["vLLM"] == (True, "0.23.0, which was tested")
    assert not results["worker"][0]
    assert "vllm_ascend.worker.worker:NPUWorker.init_device is missing" in results["worker"][1]
    assert results["eplb"] == (None, compatibility.UNSUPPORTED_FEATURES["eplb"])


def test_doctor_reports_only_missing_vllm_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(release: Release) -> str:
        raise EngineUnsupported(f"{release.engine} is not installed")

    monkeypatch.setattr(Release, "installed", absent)
    expected = ("vllm-ascend", False, "vllm-ascend is not installed")
    assert list(doctor.examine()) == [expected]
