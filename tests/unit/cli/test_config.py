"""The configuration file, and what overrides what."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from equipoise.cli.config import read_config
from equipoise.cli.parser import build_parser, read_request
from equipoise.cli.record import BY_KEY as RECORD_KEYS
from equipoise.cli.run_options import BY_KEY, resolve_run_request
from equipoise.demo.settings import Balance, RunSettings, Shares
from equipoise.hal.errors import UsageError
from equipoise.option import REAL

CPU = "equipoise.backends.cpu:BACKEND"
BAD = {
    "rank: 4": "unknown key 'rank'; did you mean ranks?",
    "frobnicate: 4": "unknown key 'frobnicate'; known: ranks",
    "4: ranks": "unknown key 4",
    "ranks: four": "key 'ranks': expected a whole number, got 'four'",
    "ranks: 4.0": "key 'ranks': expected a whole number, got 4.0",
    "ranks: true": "key 'ranks': expected a whole number, got True",
    "ranks:": "key 'ranks': expected a whole number, got None",
    "ranks: 1e1": "key 'ranks': expected a whole number, got '1e1'",
    "target: 1e999": "key 'target': expected a number, got '1e999'",
    "target: e-2": "key 'target': expected a number, got 'e-2'",
    "deadline: soon": "key 'deadline': expected a number of seconds",
    "deadline: .inf": "key 'deadline': expected a number of seconds",
    f"deadline: 1{'0' * 400}": "key 'deadline': expected a number of seconds",
    "text: []": "key 'text': expected a path or a list of paths, got []",
    'out: "a\\0b"': "key 'out': expected a path",
    "shares: fair": "key 'shares': expected static or lagged or local or node or exact, got 'fair'",
    "balance: off": "unknown key 'balance'",
    "text: [1, 2]": "key 'text': expected a path or a list of paths",
    "quiet: 1": "key 'quiet': expected true or false",
    "out: ''": "key 'out': expected a path",
    'out: "\\ud800"': "key 'out': expected a path",
    "ranks: 2\nranks: 4": "key 'ranks' is given twice",
    "text: [{a: 1, b: {c: 1, c: 2}}]": "key 'c' is given twice from line 1 on",
    "text: &a [*a]": "key 'text': expected a path or a list of paths",
    "- ranks": "is not a mapping",
    "ranks": "is not a mapping",
    "ranks: [": "is not YAML",
    "ranks: !!python/object:os.system 4": "is not YAML",
    "a: \t- b: [": "is not YAML",
    "slots: 40\nnum_redundant_experts: 8": "gives both slots and num_redundant_experts",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=map(repr, BAD))
def test_config_error_names_file_and_key_in_one_line(
    equipoise: Callable[..., Any],
    launched_settings: list[object],
    tmp_path: Path,
    text: str,
    message: str,
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    answer = equipoise("run", "--config", "run.yaml")
    assert answer.code == 2
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line
    assert "run.yaml" in line or "configuration file" in line


def test_config_that_is_not_utf8_is_rejected_with_one_line(
    equipoise: Callable[..., Any], launched_settings: list[object], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_bytes(b"ranks: \xff")
    answer = equipoise("run", "--config", "run.yaml")
    assert (answer.code, len(answer.err.splitlines())) == (2, 1)
    assert "not UTF-8 at byte offset 7" in answer.err


def test_every_run_setting_is_an_option_and_a_key() -> None:
    # Whether it balances is said by its variants.
    assert set(RunSettings.__dataclass_fields__) - {"balance"} <= set(BY_KEY)
    assert vars(build_parser().parse_args(["run"])).keys().isdisjoint(BY_KEY)


@given(value=st.floats(0, 1000), power=st.sampled_from(["e", "E"]), digits=st.integers(0, 17))
@example(value=0.01, power="e", digits=0)
def test_config_reads_numbers_in_exponent_notation(value: float, power: str, digits: int) -> None:
    """YAML 1.1 takes 1e-2 for a text: it wants a point and a sign."""
    number_text = f"{value:.{digits}e}"
    for text in (number_text, number_text.replace("e+", "e"), number_text.replace("e-0", "e-")):
        yaml_value = yaml.safe_load(f"target: {text.replace('e', power)}")["target"]
        assert REAL.from_yaml(yaml_value) == float(text)


def run_settings_of(*words: str) -> RunSettings:
    _, request = read_request(["run", *words])
    settings = request.settings
    assert isinstance(settings, RunSettings)
    return settings


def test_run_command_line_overrides_file_and_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("ranks: 2\nsteps: 60\nshares: lagged\nvariants: [unbalanced]\ntext: a.txt\n")
    settings = run_settings_of("--config", str(file), "--ranks", "1")
    assert (settings.ranks, settings.steps, settings.window_size) == (1, 60, 4)
    assert (settings.shares, settings.balance) == (Shares.LAGGED, Balance.OFF)
    assert settings.text == (Path("a.txt"),)


def test_run_texts_of_several_flags_keep_order() -> None:
    line = ["--text", "a.txt", "b.txt", "--ranks", "2", "--text", "c.txt"]
    settings = run_settings_of(*line)
    assert settings.text == (Path("a.txt"), Path("b.txt"), Path("c.txt"))
    assert run_settings_of().text == ()


@pytest.mark.slow
def test_run_accepts_backend_as_package_object(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings]
) -> None:
    assert equipoise("run", "--quiet", "--backend", CPU).code == 0
    assert [settings.backend for settings in launched_settings] == [CPU]


def test_redundant_experts_add_to_model_experts(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_redundant_experts: 4\n")
    assert resolve_run_request({}, read_config(file, BY_KEY)).settings.slots == 36
    assert resolve_run_request({"slots": 48}, read_config(file, BY_KEY)).settings.slots == 48
    assert resolve_run_request({"num_redundant_experts": 0}, {"slots": 40}).settings.slots == 32


@pytest.mark.parametrize("word", ["on", "'on'", "true", "yes"])
def test_config_accepts_yaml_booleans_for_balance(tmp_path: Path, word: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"balance: {word}")
    if word == "yes":
        assert yaml.safe_load(f"balance: {word}") == {"balance": True}
    assert read_config(file, RECORD_KEYS) == {"balance": Balance.ON}


def test_empty_config_gives_default_settings(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("# nothing yet\n")
    assert resolve_run_request({}, read_config(file, BY_KEY)).settings == RunSettings()


@pytest.mark.slow
@given(text=st.text(max_size=60) | st.text("[]{}:,-!&*'\"# \n019aZ", max_size=20))
@example(text="2001-99-99")
@example(text="[" * 2000)
@example(text="? [a]\n: b")
def test_config_of_arbitrary_text_is_read_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    file = tmp_path_factory.getbasetemp() / "run.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        options = read_config(file, BY_KEY)
    except UsageError as error:
        options = {}
        message = str(error)
    else:
        message = "run.yaml"
    assert "run.yaml" in message
    assert set(options) <= set(BY_KEY)
