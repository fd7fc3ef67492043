"""Reads ShareGPT's conversations: a JSON list of objects with a list `conversations` of turns
{"from": "human" or "gpt", "value": text}.

The files have no times, and texts instead of tokens. Tokens are estimated as a quarter of the
characters, rounded up, and the workload has a note of it. A tokenizer may differ by half, and by
more for languages other than English.
"""

from array import array

import numpy as np

from equipoise.balancer.requests.traces.json_objects import JsonListReader, list_field, string_field
from equipoise.balancer.requests.traces.trace_file import TraceFile
from equipoise.balancer.requests.traces.workload_builder import WorkloadBuilder
from equipoise.balancer.requests.workload import MAX_TOKENS, Workload

CHARACTERS_PER_TOKEN = 4
"""The usual estimate for English text."""
ANSWER_ROLES = frozenset({"gpt", "chatgpt", "bard", "bing", "assistant"})
"""Values of `from` for answers; all other turns belong to the prompt."""
MAX_BUFFERED_ANSWERS = 1 << 16
"""Number of requests that are collected before they are added to the workload."""
ESTIMATE_NOTE = f"tokens are estimated: {CHARACTERS_PER_TOKEN} characters each"


def read(source: TraceFile, most: int | None) -> Workload:
    """Reads a request for each answer of the first `most` conversations, or of all.

    Its prompt is all turns before the answer, its output the answer. Answers without text or
    without earlier turns are dropped. Raises `FormatError` that names the line.
    """
    builder, answers, dropped_answers = WorkloadBuilder(source), _Answers(), 0
    for at, (line, value) in enumerate(JsonListReader(source)):
        if at == most:
            break
        try:
            dropped_answers += answers.add(value)
        except ValueError as error:
            raise source.error(str(error), line) from None
        if len(answers) >= MAX_BUFFERED_ANSWERS:
            answers.move_to(builder)
    answers.move_to(builder)
    note = f"{dropped_answers} answers had no text, or no prompt: dropped"
    return builder.workload((ESTIMATE_NOTE, *([note] if dropped_answers else [])))


class _Answers:
    """Collects lengths of prompts and answers."""

    def __init__(self) -> None:
        self._prompts, self._outputs = array("q"), array("q")

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, value: object) -> int:
        """Adds the answers of a conversation; returns how many it drops. Raises `ValueError`."""
        before = dropped_answers = 0
        for turn in list_field(value, "conversations"):
            speaker, length = string_field(turn, "from"), len(string_field(turn, "value"))
            if speaker in ANSWER_ROLES and before and length:
                self._prompts.append(_tokens(before))
                self._outputs.append(_tokens(length))
            elif speaker in ANSWER_ROLES:
                dropped_answers += 1
            before += length
        return dropped_answers

    def move_to(self, builder: WorkloadBuilder) -> None:
        """Adds the answers to `builder` and clears them."""
        prompts, outputs = (
            np.array(part, dtype=np.int64) for part in (self._prompts, self._outputs)
        )
        builder.add(None, prompts, outputs)
        self._prompts, self._outputs = array("q"), array("q")


def _tokens(characters: int) -> int:
    return min(-(-characters // CHARACTERS_PER_TOKEN), MAX_TOKENS)
