"""What to do, in one sentence: the first line of advice."""

from dataclasses import dataclass
from enum import StrEnum

from equipoise.report.advice.inputs import LEAST_GAIN, AdviceInputs
from equipoise.report.advice.sizing import SlotChoices, min_slots_per_rank
from equipoise.report.advice.worth import Cadence, Verdict, Worth
from equipoise.report.text import format_number, pluralize


class Action(StrEnum):
    """What an operator does."""

    REDUNDANT_SLOTS = "balance with redundant slots"
    REARRANGE = "re-arrange experts, no redundant slots"
    LEAVE_OFF = "leave it off"


@dataclass(frozen=True)
class Decision:
    """An action, and a sentence for people that says it with its reason."""

    action: Action
    sentence: str


def decide(question: AdviceInputs, slots: int, worth: Worth, choices: SlotChoices) -> Decision:
    """The decision; `slots` are those that the plan of `worth` is for."""
    if worth.verdict is not Verdict.WORTH:
        what = "Leave it off" if question.installed is None else "Keep what is installed"
        notes = [_why_not(question, worth), *_slots_note(choices, slots)]
        return Decision(Action.LEAVE_OFF, f"{what}: {'; '.join(notes)}.")
    ranks = question.ranks
    more = slots // ranks - min_slots_per_rank(question.statistics.experts, ranks)
    action = Action.REDUNDANT_SLOTS if more else Action.REARRANGE
    notes = [
        f"throughput {worth.gain:+.0%} by this model",
        *_kv_note(worth, choices, slots),
        *_slots_note(choices, slots),
        *_cadence_note(worth.cadence),
    ]
    return Decision(action, f"{_what(question, slots, more)}: {'; '.join(notes)}.")


def _what(question: AdviceInputs, slots: int, more: int) -> str:
    ranks = question.ranks
    redundant = f"{pluralize(more, 'redundant slot')} on each rank ({slots:,} slots)"
    if question.installed is not None and question.installed.slots == slots:
        return f"Re-arrange experts in the {slots:,} slots installed"
    if more:
        return f"Worth it with {redundant}"
    if slots > question.statistics.experts:  # which their number does not divide
        return f"Re-arrange experts only, in the {slots:,} slots that {ranks:,} ranks need"
    return "Re-arrange experts only, no redundant slots"


def _why_not(question: AdviceInputs, worth: Worth) -> str:
    now = format_number(worth.now.mean)
    knee = format_number(question.zone.knee - 1)
    return {
        Verdict.NOISE: f"the imbalance of {now} is chance, which alone leaves "
        f"{format_number(worth.floor)}",
        Verdict.DEAD_ZONE: f"up to an imbalance of {knee} step time does not depend on it, and it "
        f"is {now}",
        Verdict.KV_CACHE: "redundant slots take more from the KV cache than balance gains, and "
        "without them hardly anything is gained",
        Verdict.SHIFTS: "the load changes from window to window, and neither a plan of all of it "
        "nor one of the last window is level in the next",
        Verdict.SMALL: f"throughput would rise by less than {LEAST_GAIN:.0%}"
        if worth.gain < LEAST_GAIN
        else "by the hardware's rates a step takes as long, since weights are read, however few "
        "rows there are",
        Verdict.WORTH: "",
    }[worth.verdict]


def _kv_note(worth: Worth, choices: SlotChoices, slots: int) -> list[str]:
    """Where the KV cache is why there are not more slots."""
    chosen = choices.of(slots)
    if chosen is None or chosen.kv_tokens is None:
        return []
    if chosen.step / choices.best_step - 1 < LEAST_GAIN:
        return []
    return ["more slots would take more from the KV cache than balance gains"]


def _slots_note(choices: SlotChoices, slots: int) -> list[str]:
    """Where slots were asked for that are not the best."""
    chosen, best = choices.of(slots), choices.advised
    if chosen is None or best.throughput < chosen.throughput * (1 + LEAST_GAIN):
        return []
    more = best.throughput / chosen.throughput - 1
    return [f"throughput would be {more:.0%} higher with {best.slots:,} slots"]


def _cadence_note(cadence: Cadence) -> list[str]:
    return [str(cadence)] if cadence in (Cadence.ONCE, Cadence.FOLLOWING) else []
