"""Conversations as in ShareGPT's files: a JSON list of objects, each with a list `conversations` of
turns {"from": "human" or "gpt", "value": text}.

The files have no times, and texts instead of tokens. Tokens are estimated as a quarter of the
characters, rounded up, which a note of the workload says; a tokenizer may differ by half, and more
for other languages than English.
"""

from array import array

import numpy as np

from equipoise.balancer.requests.traces.json_objects import Conversations, entries, text
from equipoise.balancer.requests.traces.trace_file import Source
from equipoise.balancer.requests.traces.workload_builder import Gathering
from equipoise.balancer.requests.workload import TOKENS_MOST, Workload

CHARACTERS = 4
"""Of a token, as estimated."""
ANSWERS = frozenset({"gpt", "chatgpt", "bard", "bing", "assistant"})
"""Who answers; what all others say is of the prompt."""
TURNS = 1 << 16
"""Requests that are held before they are handed over."""
ESTIMATED = f"tokens are estimated: {CHARACTERS} characters each"


def read(source: Source, most: int | None) -> Workload:
    """A request for each answer of the first `most` conversations, or of all.

    Its prompt is all turns before the answer, its output the answer. Answers without text, and
    those that nothing comes before, are no requests. Raises `FormatError` that names the line.
    """
    gathering, answers, silent = Gathering(source), _Answers(), 0
    for at, (line, value) in enumerate(Conversations(source)):
        if at == most:
            break
        try:
            silent += answers.add(value)
        except ValueError as error:
            raise source.error(str(error), line) from None
        if len(answers) >= TURNS:
            answers.move_to(gathering)
    answers.move_to(gathering)
    dropped = f"{silent} answers had no text, or no prompt: dropped"
    return gathering.workload((ESTIMATED, *([dropped] if silent else [])))


class _Answers:
    """Lengths of prompts and answers."""

    def __init__(self) -> None:
        self._prompts, self._outputs = array("q"), array("q")

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, value: object) -> int:
        """Those of a conversation; returns how many were none. Raises `ValueError`."""
        before = silent = 0
        for turn in entries(value, "conversations"):
            speaker, said = text(turn, "from"), len(text(turn, "value"))
            if speaker in ANSWERS and before and said:
                self._prompts.append(_tokens(before))
                self._outputs.append(_tokens(said))
            elif speaker in ANSWERS:
                silent += 1
            before += said
        return silent

    def move_to(self, gathering: Gathering) -> None:
        """Hand them over, and begin anew."""
        prompts, outputs = (
            np.array(part, dtype=np.int64) for part in (self._prompts, self._outputs)
        )
        gathering.add(None, prompts, outputs)
        self._prompts, self._outputs = array("q"), array("q")


def _tokens(characters: int) -> int:
    return min(-(-characters // CHARACTERS), TOKENS_MOST)
