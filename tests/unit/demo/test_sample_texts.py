"""The sample texts were not trained on, and the proof of it would find it if they were."""

import hashlib
import re
from importlib import import_module
from importlib.resources import files
from types import ModuleType

import pytest
from helpers.paths import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = ROOT / "examples"
KINDS = ("python", "english", "chinese", "tables")
SAME_MODULE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("training.windows")


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("training.corpus")


def sample(kind: str) -> bytes:
    return files("equipoise.demo").joinpath("text", f"{kind}.txt").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_sample_text_shares_no_64_bytes_with_training_text(kind: str, windows: ModuleType) -> None:
    trained = windows.unpack((EXAMPLES / "training" / "windows.bin").read_bytes())
    assert windows.WINDOW == 64
    assert len(trained) > 100_000
    assert windows.suspicious_offsets(sample(kind), trained) == []


@SAME_MODULE
@given(st.data(), st.binary(min_size=200, max_size=400), st.binary(min_size=1, max_size=99))
def test_overlap_search_finds_planted_window(
    windows: ModuleType, data: st.DataObject, held_out_text: bytes, padding: bytes
) -> None:
    trained = windows.unpack(windows.pack([sample("python")[:1000] + held_out_text]))
    start = data.draw(st.integers(0, len(held_out_text) - windows.WINDOW))
    text = padding + held_out_text[start : start + windows.WINDOW] + padding
    assert windows.suspicious_offsets(text, trained)


def test_overlap_search_accepts_other_text(windows: ModuleType) -> None:
    trained = windows.unpack(windows.pack([sample("python"), sample("tables")]))
    assert windows.suspicious_offsets(sample("english"), trained) == []
    assert windows.suspicious_offsets(b"short", trained) == []


def test_window_hashes_are_fixed(windows: ModuleType) -> None:
    text = bytes(range(1, 81))
    digest = hashlib.sha256(windows.pack([text])).hexdigest()
    assert digest == "2dc705fc1ffcb81c6ec305030e96321909140f06068e465212a25887180863b8"
    with pytest.raises(ValueError, match="whole number of 5-byte hashes"):
        windows.unpack(b"123456")


def test_corpus_drops_and_rejects_held_out_lines(
    corpus: ModuleType,
) -> None:
    held_out = (
        b"x" * 10 + b"The quick brown fox jumps over the lazy dog, and over seventy more bytes."
    )
    own = b"A line of training text that nobody holds out anywhere at all, I think.\n"
    trained = own + held_out + b"\n" + own
    assert corpus._without_shared(trained, held_out) == own + own
    with pytest.raises(ValueError, match="shared windows"):
        corpus.refuse_shared(held_out, corpus.Corpus("python", held_out, trained))


@pytest.mark.parametrize("kind", KINDS)
def test_sample_text_is_64_kb_with_recorded_origin(kind: str) -> None:
    text = sample(kind)
    origins = files("equipoise.demo").joinpath("text", "ORIGINS.md").read_text()
    assert 60_000 < len(text) <= 65_536
    assert 0 not in text
    assert text.decode().endswith("\n")
    row = re.search(rf"^\| {kind}\.txt \|.*$", origins, re.MULTILINE)
    assert row is not None
    assert hashlib.sha256(text).hexdigest() in row.group()
    notices = files("equipoise.demo").joinpath("text", "NOTICES.md").read_text()
    assert f"## {kind}.txt" in notices
