"""`equipoise doctor` on what is here and on what is broken."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equipoise.backends.ascend.lookup_tables import table_bytes
from equipoise.backends.cpu.accelerator import CpuBackend
from equipoise.balancer.experts.weights.memory_report import BACKEND_TABLES
from equipoise.cli import doctor, engines
from equipoise.cli.doctor import (
    BackendFinding,
    collect_findings,
    describe_value,
    json_value,
    probe_backend,
    render_findings,
)
from equipoise.cli.engines import DoctorCheck
from equipoise.cli.memory_report import demo_memory, demo_memory_report, render_memory_report
from equipoise.demo.model.config import ModelConfig
from equipoise.demo.model.invariance import NotBatchInvariant
from equipoise.demo.settings import Balance, RunSettings
from equipoise.hal.capabilities import Capabilities, SlotFormat, Unavailable
from equipoise.hal.errors import BackendUnavailable


def test_doctor_lists_cpu_backend_with_capabilities(
    equipoise: Callable[..., Any], tmp_path: Path
) -> None:
    answer = equipoise("doctor", "--json", "found.json")
    assert answer.code == 0
    assert answer.out.splitlines()[-1] == "ready: equipoise run --backend cpu"
    findings = json.loads((tmp_path / "found.json").read_text())
    accelerators = {backend["name"]: backend for backend in findings["accelerators"]}
    assert accelerators.keys() >= {"cpu", "virtual"}
    capabilities = accelerators["cpu"]["capabilities"]
    assert (capabilities["stream_lock"], capabilities["streams"]) == (True, 4)
    assert capabilities["slot_formats"] == ["strided"]
    assert accelerators["cpu"]["devices"] == 1
    assert {backend["devices"] for backend in findings["communicators"]} == {None}
    assert {check["name"] for check in findings["checks"]} >= {"native core", "batch invariance"}


def test_doctor_says_where_it_wrote(equipoise: Callable[..., Any]) -> None:
    assert equipoise("doctor", "--json", "new/found.json").err == (
        "equipoise: findings: new/found.json, in a new folder\n"
    )


def test_doctor_table_fits_80_columns(equipoise: Callable[..., Any]) -> None:
    assert max(map(len, equipoise("doctor").out.splitlines())) <= 80


def test_doctor_says_that_checks_of_an_engine_failed(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = DoctorCheck("abacus", passed=False, detail="not installed: install abacus")
    monkeypatch.setattr(engines, "installed", lambda: ("abacus",))
    monkeypatch.setattr(engines, "examine", lambda name: (missing,))
    answer = equipoise("doctor", "--abacus")
    assert answer.code == 1
    assert "MISSING: not installed: install abacus" in answer.out
    assert answer.out.splitlines()[-1] == (
        "some checks failed: their lines say what to install or change"
    )


def test_doctor_help_tells_the_exit_code_of_an_engine(
    equipoise: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        equipoise("doctor", "--help")
    words = " ".join(capsys.readouterr().out.split())
    assert "Exit code 0 if an accelerator works; with the name of an engine, if every" in words


def test_doctor_fails_without_working_accelerator() -> None:
    accelerator = BackendFinding("abacus", works=False, detail="no beads")
    findings = replace(collect_findings(), accelerators=(accelerator,))
    assert findings.exit_code == 1
    assert "no: no beads" in render_findings(findings)
    assert (
        render_findings(findings).splitlines()[-1] == "no accelerator works: see the reasons above"
    )
    assert replace(findings, accelerators=()).exit_code == 1


def test_doctor_without_torch_says_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    findings = collect_findings()
    assert DoctorCheck("batch invariance", False, "unknown without torch") in findings.checks
    text = render_findings(findings)
    assert "see `checks` below" not in text.partition("\nchecks\n")[2]
    assert "\nplanner, reports, simulator, proxy and picker work without torch\n" in text


@pytest.mark.parametrize(
    ("devices", "command"),
    [
        (1, "equipoise run --backend abacus --ranks 1"),
        (8, "equipoise run --backend abacus"),
    ],
)
def test_doctor_recommends_a_device_where_one_works(devices: int, command: str) -> None:
    accelerators = [
        BackendFinding(name, works=True, detail="fine", capabilities={}, devices=count)
        for name, count in (("cpu", 1), ("abacus", devices), ("virtual", 1))
    ]
    findings = replace(collect_findings(), accelerators=tuple(accelerators))
    assert render_findings(findings).splitlines()[-1] == f"ready: {command}"


def test_doctor_reports_backend_import_failure() -> None:
    def find(name: str) -> doctor.ProbedBackend:
        raise BackendUnavailable(f"backend {name!r} does not import")

    assert probe_backend("abacus", find) == BackendFinding(
        "abacus", False, "backend 'abacus' does not import"
    )


def test_doctor_calls_capabilities_of_unavailable_backend_unknown() -> None:
    class Abacus:
        capabilities = Capabilities()

        def probe(self) -> Unavailable:
            return Unavailable("no beads: buy some")

    finding = probe_backend("abacus", lambda name: Abacus())
    assert (finding.works, finding.detail) == (False, "no beads: buy some")
    assert finding.capabilities is None
    lines = render_findings(replace(collect_findings(), accelerators=(finding,))).splitlines()
    assert "    capabilities                  unknown" in lines


def test_doctor_prints_device_count_of_working_backend() -> None:
    class Herd(CpuBackend):
        def devices(self) -> int:
            return 12

    finding = probe_backend("herd", lambda name: Herd())
    assert finding.devices == 12
    [line] = [
        x
        for x in render_findings(replace(collect_findings(), accelerators=(finding,))).splitlines()
        if x.startswith("    devices")
    ]
    assert line.split() == ["devices", "12"]


def test_doctor_reports_batch_variant_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(config: ModelConfig) -> None:
        raise NotBatchInvariant("router gives other bits")

    monkeypatch.setattr("equipoise.demo.model.invariance.check_batch_invariance", refuse)
    findings = collect_findings()
    assert DoctorCheck("batch invariance", False, "router gives other bits") in findings.checks
    assert "MISSING: router gives other bits" in render_findings(findings)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "yes"),
        (False, "no"),
        (4, "4"),
        (SlotFormat.STRIDED, "strided"),
        (frozenset(), "none"),
        (frozenset({SlotFormat.STRIDED, SlotFormat.PRIVATE}), "private, strided"),
    ],
)
def test_doctor_formats_capability_values(value: object, words: str) -> None:
    assert describe_value(json_value(value)) == words


def test_demo_memory_counts_expert_slots_and_staging() -> None:
    memory = demo_memory(RunSettings())
    expert = 3 * 128 * 40 * 4
    assert memory["experts held without balancing"] == 8 * 6 * expert
    assert memory["redundant slots"] == 2 * 6 * expert
    assert memory["staging"] == 2 * 10 * expert
    assert (
        memory["packed slots"] == 2 * 16 * expert
    )  # a round's, of `slots_per_message` slots each way
    assert memory["communicators"] == 0  # over gloo they buffer in the host's memory


def test_demo_memory_without_balancing_has_no_staging() -> None:
    memory = demo_memory(RunSettings(balance=Balance.OFF))
    assert memory["redundant slots"] == memory["staging"] == memory["packed slots"] == 0


def test_demo_memory_hccl_packs_twice_the_staging() -> None:
    memory = demo_memory(RunSettings(communicator="hccl", slots_per_message=1))
    assert memory["packed slots"] == 2 * (memory["staging"] or 0)


def test_demo_memory_counts_replica_tables_of_ascend() -> None:
    """Known without torch_npu; the total has them."""
    cpu, ascend = (demo_memory_report(RunSettings(backend=name, communicator="gloo"))
                   for name in ("cpu", "ascend"))  # fmt: skip
    (own,) = set(ascend.items) - set(cpu.items)
    assert (own.name, own.nbytes) == (BACKEND_TABLES, table_bytes(6, 32, 40))
    assert ascend.total == cpu.total + table_bytes(6, 32, 40)


def test_demo_memory_of_undeclared_communicator_is_unknown() -> None:
    settings = RunSettings(backend="virtual")
    assert demo_memory(settings)["communicators"] is None
    report = render_memory_report(settings).splitlines()
    assert "unknown" in report[-2]
    assert report[-1].endswith("at least")
