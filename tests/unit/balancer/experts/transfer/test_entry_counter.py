"""Entries of a layer in the two steps in which it has a lock, whatever order threads take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.transfer.layer_locks import EntryCounter
from equipoise.hal.errors import EngineError, LockPoisoned


@given(st.data(), st.integers(1, 4), st.integers(0, 9))
def test_visits_hold_lock_from_first_entry_to_last_exit(
    data: st.DataObject, entries: int, first: int
) -> None:
    counter, lock_calls = EntryCounter(5, first, entries), list[str]()
    for step in (first, first + 1):
        lock_calls.clear()
        waiting, inside = entries, 0
        while waiting or inside:
            enters = not inside or (waiting and data.draw(st.booleans()))
            if enters:
                counter.enter(step, lambda: lock_calls.append("take"))
                waiting, inside = waiting - 1, inside + 1
            else:
                counter.exit(lambda: lock_calls.append("give back"))
                inside -= 1
            is_over = not waiting and not inside
            assert lock_calls == ["take", "give back"][: 1 + is_over]
    counter.check_finished()


@given(st.integers(1, 4), st.integers(0, 9), st.data())
def test_layer_visits_must_equal_declared_entries(
    entries: int, attempts: int, data: st.DataObject
) -> None:
    counter = EntryCounter(5, 7, entries)
    entry_count = min(attempts, entries)
    for _ in range(entry_count):
        counter.enter(7, lambda: None)
    exit_count = data.draw(st.integers(0, entry_count))
    for _ in range(exit_count):
        counter.exit(lambda: None)
    if entry_count == entries:
        with pytest.raises(EngineError, match=f"layer 5 is entered more than {entries} times in s"):
            counter.enter(7, lambda: None)
    if exit_count < entries:
        message = (
            f"layer 5 was entered {entry_count} times and left {exit_count} times "
            f"in step 7, not {entries}"
        )
        with pytest.raises(EngineError, match=message):
            counter.enter(8, lambda: None)
    with pytest.raises(EngineError, match=f"in step {7 + (exit_count == entries)}, not {entries}"):
        counter.check_finished()


def test_visits_do_not_count_entry_whose_lock_failed() -> None:
    counter = EntryCounter(5, 7, 1)

    def raise_poisoned() -> None:
        raise LockPoisoned("late")

    with pytest.raises(LockPoisoned):
        counter.enter(7, raise_poisoned)
    counter.enter(7, lambda: None)
