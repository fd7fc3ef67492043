"""The plugin in an engine that is a stand-in: what it changes, and what it refuses."""

import json
from contextlib import nullcontext
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fakes.fake_vllm import CONFIGURATION, configuration, engine

from equipoise.hal.errors import ConfigError, EngineUnsupported, IntegrationError
from equipoise.integrations.vllm import compatibility, entry, plugin
from equipoise.integrations.vllm.compatibility import Symbol
from equipoise.integrations.vllm.entry import SETTINGS_KEY, SETTINGS_VARIABLE


class Graphs(Enum):
    """As the engine names what it captures."""

    NONE = 0
    FULL = 2


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tested version, whose parts have all they need, and nothing in the environment."""
    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    monkeypatch.setattr(compatibility, "installed", lambda: compatibility.TESTED_VERSIONS[0])
    monkeypatch.setattr(
        compatibility, "FEATURE_SYMBOLS", dict.fromkeys(compatibility.FEATURE_SYMBOLS, ())
    )


def engine_config(config: Any) -> Any:
    """The config that the engine creates with the plugin registered."""
    with engine() as modules:
        entry.register()
        return modules[CONFIGURATION].EngineArgs(config).create_engine_config()


def test_plugin_leaves_config_unchanged_without_settings() -> None:
    config = configuration({"other": 1}, enable_eplb=True)
    assert engine_config(config) is config
    assert config.parallel_config.worker_extension_cls == ""
    assert config.additional_config == {"other": 1}


def test_plugin_sets_worker_extension_when_part_is_configured() -> None:
    config = engine_config(configuration({SETTINGS_KEY: {"eplb": True}}, enable_eplb=True))
    assert config.parallel_config.worker_extension_cls == plugin.EXTENSION_CLASS


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_async": True, "communicator": None, "policy": "default"}, ""),
        ({"communicator": "torch_gloo"}, "--eplb-config communicator torch_gloo has no effect"),
        ({"use_async": False, "enable_migration_batching": True}, "use_async False, enable_migr"),
    ],
)
def test_plugin_names_eplb_config_options_without_effect(
    options: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine_config(
        configuration(
            {SETTINGS_KEY: {"eplb": True}},
            enable_eplb=True,
            eplb_config=SimpleNamespace(**options),
        )
    )
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == bool(named)
    assert named in "".join(warnings)


@pytest.mark.parametrize("additional", [{}, {SETTINGS_KEY: None}])
def test_plugin_copies_environment_settings_into_config(
    additional: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin_settings = {"pp_transport": True}
    monkeypatch.setenv(SETTINGS_VARIABLE, json.dumps(plugin_settings))
    config = engine_config(configuration(additional, pipeline_parallel_size=2))
    assert config.additional_config == {SETTINGS_KEY: plugin_settings}


@pytest.mark.parametrize(
    ("value", "variable", "is_named"),
    [
        ({"pp_transport": True}, '{"eplb": true}', True),
        ({"pp_transport": True}, "no JSON", True),
        (False, '{"eplb": true}', True),
        # As in a process that has both from the one that copied them.
        ({"pp_transport": True}, '{"pp_transport": true}', False),
        ({"pp_transport": True}, " ", False),
        (None, '{"pp_transport": true}', False),
    ],
)
def test_plugin_names_environment_settings_that_config_overrides(
    value: object,
    variable: str,
    is_named: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, variable)
    engine_config(configuration({SETTINGS_KEY: value}, pipeline_parallel_size=2))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    message = "equipoise: --additional-config has settings, so those of EQUIPOISE_VLLM are not used"
    assert lines == [message] * is_named


@pytest.mark.parametrize(
    ("part", "parallel", "message"),
    [
        ("eplb_policy", {}, "need --enable-eplb"),
        ("eplb", {}, "need --enable-eplb"),
        ("eplb", {"enable_eplb": True, "enable_elastic_ep": True}, "elastic"),
        ("eplb", {"enable_eplb": True, "enable_fault_tolerance": True}, "fault-tolerance"),
        (
            "pp_transport",
            {"pipeline_parallel_size": 2, "enable_fault_tolerance": True},
            "fault-tolerance",
        ),
        ("pp_transport", {}, "--pipeline-parallel-size of at least 2"),
        (
            "pp_transport",
            {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 2},
            "prefill context parallelism divides them",
        ),
        ("dp_load_balancer", {}, "--data-parallel-size of at least 2"),
        (
            "dp_load_balancer",
            {"data_parallel_size": 2, "data_parallel_external_lb": True},
            "external",
        ),
    ],
)
def test_plugin_refuses_part_that_would_have_no_effect(
    part: str, parallel: dict[str, Any], message: str
) -> None:
    with pytest.raises(IntegrationError, match=message):
        engine_config(configuration({SETTINGS_KEY: {part: True}}, **parallel))


@pytest.mark.parametrize(
    ("where", "attributes", "message"),
    [
        ("model_config", {"enable_sleep_mode": True}, "sleep mode"),
        ("", {"weight_transfer_config": object()}, "transfer of weights"),
        ("", {"lora_config": object()}, "LoRA weights"),
        ("load_config", {"load_format": "ipc_cache"}, "ipc_cache"),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ("parallel_config", {"all2all_backend": "deepep_low_latency"}, "set NCCL_MAX_CTAS"),
    ],
)
def test_plugin_refuses_engine_with_unsupported_vllm_options(
    where: str, attributes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration({SETTINGS_KEY: {"eplb": True}}, enable_eplb=True)
    vars(getattr(config, where) if where else config).update(attributes)
    with pytest.raises(IntegrationError, match=message):
        engine_config(config)
    if "NCCL" in message:
        monkeypatch.setenv("NCCL_MAX_CTAS", "8")
        assert engine_config(config).parallel_config.worker_extension_cls == plugin.EXTENSION_CLASS


@pytest.mark.parametrize(
    ("where", "attributes", "message"),
    [
        ("", {}, None),
        ("compilation_config", {"cudagraph_mode": SimpleNamespace(name="FULL")}, "--enforce-eager"),
        ("parallel_config", {"num_ubatches": 2}, "two micro-batches make two"),
        ("", {"speculative_config": object()}, "a draft model skips some"),
    ],
)
def test_plugin_refuses_in_place_commit_where_a_lock_would_not_hold(
    where: str, attributes: dict[str, Any], message: str | None
) -> None:
    for commit in ("staged", "in_place"):
        config = configuration({SETTINGS_KEY: {"eplb": {"commit": commit}}}, enable_eplb=True)
        vars(config).setdefault("speculative_config", None)
        vars(config.parallel_config).setdefault("num_ubatches", 0)
        vars(getattr(config, where) if where else config).update(attributes)
        accepted = message is None or commit == "staged"
        with nullcontext() if accepted else pytest.raises(IntegrationError, match=message):
            engine_config(config)


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("cuda", {}, None),
        ("cuda", {"communicator": "nccl", "shares": "exact"}, None),
        ("cuda", {"communicator": "gloo"}, None),
        ("cuda", {"communicator": "hccl"}, "hccl is not for a device of type cuda: nccl or gloo"),
        (
            "cuda",
            {"communicator": "gloo", "shares": "exact"},
            "cannot: use nccl, or shares",
        ),
        ("npu", {"communicator": "gloo"}, None),
        ("npu", {"communicator": "nccl"}, "nccl is not for a device of type npu: hccl or gloo"),
        (
            "cuda",
            {"communicator": "gloo", "shares": "node"},
            "shares node gather the counts of a layer on the device",
        ),
        ("cuda", {"communicator": "gloo", "shares": "local"}, None),
        ("cpu", {"communicator": "gloo", "shares": "exact"}, None),
        ("cpu", {"communicator": "nccl"}, "nccl is not for a device of type cpu: gloo"),
        ("xpu", {"communicator": "gloo"}, "no communicator of ours is"),
    ],
)
def test_plugin_takes_only_communicator_of_device(
    device: str, options: dict[str, str], message: str | None
) -> None:
    config = configuration({SETTINGS_KEY: {"eplb": options or True}}, enable_eplb=True)
    config.device_config.device_type = device
    with nullcontext() if message is None else pytest.raises(IntegrationError, match=message):
        engine_config(config)


def test_plugin_with_gloo_needs_no_bound_on_nccl_blocks() -> None:
    settings = {SETTINGS_KEY: {"eplb": {"communicator": "gloo"}}}
    config = configuration(settings, enable_eplb=True, all2all_backend="deepep_low_latency")
    assert engine_config(config).parallel_config.worker_extension_cls == plugin.EXTENSION_CLASS


@pytest.mark.parametrize(
    ("runner", "parallel", "expect_error"),
    [
        ("generate", {"pipeline_parallel_size": 2}, True),
        ("pooling", {"data_parallel_size": 2}, True),
        ("generate", {"data_parallel_size": 2}, False),
        ("pooling", {}, False),
    ],
)
def test_plugin_refuses_v1_runner_that_leaves_steps_out(
    runner: str, parallel: dict[str, int], expect_error: bool
) -> None:
    config = configuration({SETTINGS_KEY: {"eplb": True}}, enable_eplb=True, **parallel)
    config.model_config.runner_type = runner
    assert engine_config(config) is config, "the second model runner counts every forward"
    config.use_v2_model_runner = False
    with pytest.raises(IntegrationError, match="V1") if expect_error else nullcontext():
        engine_config(config)


@pytest.mark.parametrize("part", ["eplb", "pp_transport"])
def test_plugin_refuses_ray_compiled_graph(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    several = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    config = configuration({SETTINGS_KEY: {part: True}}, enable_eplb=True, **several)
    assert engine_config(config) is config
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(IntegrationError, match="Ray's compiled graph"):
        engine_config(config)


@pytest.mark.parametrize(
    ("shares", "mode", "expect_error"),
    [
        ("exact", Graphs.FULL, True),
        ("node", Graphs.FULL, True),
        ("node", Graphs.NONE, False),
        ("local", Graphs.FULL, False),
        (None, Graphs.FULL, False),
        ("exact", Graphs.NONE, False),
        ("exact", None, False),
        ("lagged", Graphs.FULL, False),
    ],
)
def test_plugin_refuses_exact_shares_with_captured_forwards(
    shares: str, mode: Graphs | None, expect_error: bool
) -> None:
    config = configuration({SETTINGS_KEY: {"eplb": {"shares": shares}}}, enable_eplb=True)
    config.compilation_config.cudagraph_mode = mode
    expectation = (
        pytest.raises(IntegrationError, match="--enforce-eager") if expect_error else nullcontext()
    )
    with expectation:
        engine_config(config)


def test_plugin_refuses_unknown_settings() -> None:
    with pytest.raises(ConfigError, match="unknown engin"):
        engine_config(configuration({SETTINGS_KEY: {"engin": True}}))


def test_plugin_refuses_untested_version_and_names_tested_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compatibility, "installed", lambda: "9.9.9")
    config = configuration({SETTINGS_KEY: {"pp_transport": True}}, pipeline_parallel_size=2)
    with pytest.raises(EngineUnsupported, match=r"vLLM 9\.9\.9 \(tested: 0\.32\.0, 0\.33\.0\)"):
        engine_config(config)
    assert config.parallel_config.worker_extension_cls == ""
    monkeypatch.setenv(compatibility.ACCEPT_VERSION_VARIABLE, "9.9.9")
    assert engine_config(config).parallel_config.worker_extension_cls == plugin.EXTENSION_CLASS


def test_plugin_names_missing_symbol_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    symbol = Symbol("vllm.place", "Thing.call", "self")
    monkeypatch.setitem(compatibility.FEATURE_SYMBOLS, "pp_transport", (symbol,))
    config = configuration({SETTINGS_KEY: {"pp_transport": True}}, pipeline_parallel_size=2)
    with pytest.raises(EngineUnsupported, match=r"vllm\.place:Thing\.call is missing"):
        engine_config(config)
    assert config.parallel_config.worker_extension_cls == ""


def test_plugin_refuses_to_replace_foreign_worker_extension() -> None:
    theirs = configuration(
        {SETTINGS_KEY: {"eplb": True}}, enable_eplb=True, worker_extension_cls="json.JSONDecoder"
    )
    with pytest.raises(IntegrationError, match=r"json\.JSONDecoder: a worker takes one extension"):
        engine_config(theirs)
