"""The oracle of the stream lock keeps the protocol that `hal/lock.py` states."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.conformance.lock_model import LockModel
from equipoise.hal.errors import LockMisuse, LockPoisoned, StreamTimeout

OPS = ("section", "signal", "wait", "poison", "drain")
histories = st.lists(st.sampled_from(OPS))


def after(ops: list[str]) -> LockModel:
    model = LockModel()
    for op in ops:
        call: Callable[[], object] = getattr(model, op)
        call()
    return model


@given(histories)
def test_lock_model_has_at_most_one_owner(
    ops: list[str],
) -> None:
    model = after(ops)
    assert model.full + model.empty + model.owns <= 1


@given(histories)
def test_lock_model_passes_at_most_one_section_per_signal(
    ops: list[str],
) -> None:
    signals = ops.count("signal")
    model = after(ops)
    assert model.passed <= model.launched
    assert "poison" in ops or model.passed <= signals


@given(histories)
def test_lock_model_drain_fails_only_during_section(ops: list[str]) -> None:
    model = after(ops)
    under_way, epoch = model.passed < model.launched, model.epoch
    assert model.drain() == ((StreamTimeout,) if under_way else ())
    assert model.epoch == epoch + (not under_way)


def test_lock_model_alternates_mover_and_reader() -> None:
    model = LockModel()
    assert model.wait() == (LockMisuse,)
    assert model.signal() == ()
    assert model.signal() == (LockMisuse,)
    assert model.wait() == (StreamTimeout,)
    model.section()
    assert model.wait() == ()


def test_lock_model_poison_lasts_until_drain() -> None:
    model = LockModel()
    model.section()
    model.poison()
    assert (model.passed, model.check()) == (1, (LockPoisoned,))
    model.drain()
    assert (model.epoch, model.owns, model.check()) == (1, True, ())
