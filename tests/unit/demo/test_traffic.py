"""Traffic is a pure function of its arguments, and bad text is refused in one line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.demo.scheduler import RequestScheduler
from equipoise.demo.traffic import (
    DEFAULT_PHASES,
    InvalidText,
    Traffic,
    TrafficPhase,
    load_phases,
    requests_of_rank,
    shipped_phase,
)
from equipoise.hal.errors import UsageError


def phase(name: str, prompts: int, prompt: int = 16) -> TrafficPhase:
    """Text whose every prompt is different."""
    return TrafficPhase(name, b"".join(f"{name}{i}".encode().ljust(prompt) for i in range(prompts)))


@st.composite
def traffics(draw: st.DrawFn) -> Traffic:
    phases = tuple(
        phase(f"p{i}-", draw(st.integers(1, 40))) for i in range(draw(st.integers(1, 4)))
    )
    steps = draw(st.integers(len(phases), 30))
    return Traffic(phases, steps, draw(st.integers(1, 9)), prompt=16, seed=draw(st.integers()))


@given(traffics())
def test_traffic_is_a_pure_function_of_arguments(traffic: Traffic) -> None:
    again = Traffic(
        traffic.phases, traffic.steps, traffic.requests_per_step, prompt=16, seed=traffic.seed
    )
    backwards = {step: again.arrivals(step) for step in reversed(range(again.steps))}
    assert all(traffic.arrivals(step) == backwards[step] for step in range(traffic.steps))


@given(traffics(), st.integers(1, 8))
def test_traffic_divides_same_requests_among_any_ranks(traffic: Traffic, ranks: int) -> None:
    for step in range(traffic.steps):
        arrivals = traffic.arrivals(step)
        parts = [requests_of_rank(arrivals, rank, ranks) for rank in range(ranks)]
        assert sorted(r.id for part in parts for r in part) == [r.id for r in arrivals]
        assert all(arrivals[i] in parts[i % ranks] for i in range(len(arrivals)))


@given(traffics())
def test_traffic_phases_take_equal_consecutive_steps(traffic: Traffic) -> None:
    order = [traffic.phase_of(step) for step in range(traffic.steps)]
    sizes = [order.count(i) for i in range(len(traffic.phases))]
    assert order == sorted(order)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert traffic.switch_steps == tuple(order.index(i) for i in range(1, len(sizes)))


@given(traffics())
def test_traffic_serves_every_prompt_before_repeating_one(
    traffic: Traffic,
) -> None:
    prompts_by_phase: dict[int, list[bytes]] = {}
    for step in range(traffic.steps):
        for request in traffic.arrivals(step):
            prompts_by_phase.setdefault(request.phase, []).append(request.prompt)
    for index, prompts in prompts_by_phase.items():
        text = traffic.phases[index].text
        every = [text[i : i + 16] for i in range(0, len(text), 16)]
        for lap in range(0, len(prompts), len(every)):
            part = prompts[lap : lap + len(every)]
            assert len(set(part)) == len(part)
            assert set(part) <= set(every)


@given(traffics())
def test_traffic_request_ids_are_consecutive(traffic: Traffic) -> None:
    ids = [r.id for step in range(traffic.steps) for r in traffic.arrivals(step)]
    assert ids == list(range(traffic.steps * traffic.requests_per_step))


def test_traffic_order_depends_on_seed() -> None:
    phases = (phase("a", 40),)
    one, other = (Traffic(phases, 5, prompt=16, seed=seed) for seed in (0, 1))
    assert [one.arrivals(s) for s in range(5)] != [other.arrivals(s) for s in range(5)]


def test_load_phases_defaults_to_shipped_texts() -> None:
    assert tuple(phase.name for phase in load_phases()) == DEFAULT_PHASES
    assert shipped_phase("english").name == "english"
    with pytest.raises(InvalidText, match="no text of kind 'klingon'"):
        shipped_phase("klingon")


def test_load_phases_keeps_file_order_and_names(tmp_path: Path) -> None:
    for name in ("second", "first"):
        (tmp_path / f"{name}.txt").write_text(name * 100)
    phases = load_phases([tmp_path / "first.txt", tmp_path / "second.txt"])
    assert [(p.name, p.text[:6]) for p in phases] == [("first", b"firstf"), ("second", b"second")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"a" * 127, "has 127 bytes; one prompt takes 128"),
        (b"a" * 200 + b"\0" + b"a" * 200, "has a NUL byte at offset 200"),
        (b"a" * 150 + b"\xff" + b"a" * 50, "is not UTF-8 at byte offset 150"),
    ],
)
def test_load_phases_rejects_bad_content_naming_file(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidText) as error:
        load_phases([path])
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, UsageError)


def test_load_phases_rejects_unreadable_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidText, match="does not exist"):
        load_phases([tmp_path / "none.txt"])
    with pytest.raises(InvalidText, match="is a directory"):
        load_phases([tmp_path])

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("equipoise.demo.traffic.read_input", refuse)
    with pytest.raises(InvalidText, match="cannot be read: Permission denied"):
        load_phases([tmp_path / "locked.txt"])


def test_traffic_rejects_impossible_arguments() -> None:
    with pytest.raises(ValueError, match="1 steps cannot hold 2 phases"):
        Traffic((phase("a", 9), phase("b", 9)), 1, prompt=16)
    with pytest.raises(ValueError, match="at least 1"):
        Traffic((phase("a", 9),), 1, requests_per_step=0, prompt=16)
    with pytest.raises(ValueError, match="text of a is shorter than one prompt"):
        Traffic((phase("a", 1),), 1, prompt=17)
    with pytest.raises(IndexError, match="step 3 is outside 0 to 2"):
        Traffic((phase("a", 9),), 3, prompt=16).phase_of(3)


@given(
    requests_per_step=st.integers(1, 6),
    ranks=st.integers(1, 4),
    new_tokens=st.integers(1, 5),
    steps=st.integers(1, 12),
)
def test_traffic_tokens_are_those_that_all_ranks_forward(
    requests_per_step: int, ranks: int, new_tokens: int, steps: int
) -> None:
    traffic = Traffic((phase("a", 64),), steps, requests_per_step, 4, new_tokens)
    schedulers = [RequestScheduler(traffic, rank, ranks) for rank in range(ranks)]
    for step in range(steps):
        rows = 0
        for scheduler in schedulers:
            batch = scheduler.next_batch(step)
            rows += batch.rows
            scheduler.add_tokens(batch, [0] * len(list(batch)))
        assert traffic.tokens(step) == rows
