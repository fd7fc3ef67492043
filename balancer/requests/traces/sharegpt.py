"""Conversations as in ShareGPT's files: a JSON list of objects, each with a list `conversations` of
turns {"from": "human" or "gpt", "value": text}.

The files have no times, and texts instead of tokens. Tokens are estimated as a quarter of the
characters, rounded up, which a note of the workload says; a tokenizer may differ by half, and more
for other languages than English.
"""

from array import array

import numpy as np

from equipoise.balancer.requests.traces.json_objects import JsonListReader, list_field, string_field
from equipoise.balancer.requests.traces.trace_file import TraceFile
from equipoise.balancer.requests.traces.workload_builder import WorkloadBuilder
from equipoise.balancer.requests.workload import MAX_TOKENS, Workload

CHARACTERS_PER_TOKEN = 4
"""Of a token, as estimated."""
ANSWER_ROLES = frozenset({"gpt", "chatgpt", "bard", "bing", "assistant"})
"""Who answers; what all others say is of the prompt."""
MAX_BUFFERED_ANSWERS = 1 << 16
"""Requests that are held before they are handed over."""
ESTIMATE_NOTE = f"tokens are estimated: {CHARACTERS_PER_TOKEN} characters each"


def read(source: TraceFile, most: int | None) -> Workload:
    """A request for each answer of the first `most` conversations, or of all.

    Its prompt is all turns before the answer, its output the answer. Answers without text, and
    those that nothing comes before, are no requests. Raises `FormatError` that names the line.
    """
    gathering, answers, silent = WorkloadBuilder(source), _Answers(), 0
    for at, (line, value) in enumerate(JsonListReader(source)):
        if at == most:
            break
        try:
            silent += answers.add(value)
        except ValueError as error:
            raise source.error(str(error), line) from None
        if len(answers) >= MAX_BUFFERED_ANSWERS:
            answers.move_to(gathering)
    answers.move_to(gathering)
    dropped = f"{silent} answers had no text, or no prompt: dropped"
    return gathering.workload((ESTIMATE_NOTE, *([dropped] if silent else [])))


class _Answers:
    """Lengths of prompts and answers."""

    def __init__(self) -> None:
        self._prompts, self._outputs = array("q"), array("q")

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, value: object) -> int:
        """Those of a conversation; returns how many were none. Raises `ValueError`."""
        before = silent = 0
        for turn in list_field(value, "conversations"):
            speaker, said = string_field(turn, "from"), len(string_field(turn, "value"))
            if speaker in ANSWER_ROLES and before and said:
                self._prompts.append(_tokens(before))
                self._outputs.append(_tokens(said))
            elif speaker in ANSWER_ROLES:
                silent += 1
            before += said
        return silent

    def move_to(self, gathering: WorkloadBuilder) -> None:
        """Hand them over, and begin anew."""
        prompts, outputs = (
            np.array(part, dtype=np.int64) for part in (self._prompts, self._outputs)
        )
        gathering.add(None, prompts, outputs)
        self._prompts, self._outputs = array("q"), array("q")


def _tokens(characters: int) -> int:
    return min(-(-characters // CHARACTERS_PER_TOKEN), MAX_TOKENS)
