"""ShareGPT's conversations: a request for each answer, its tokens estimated."""

import json
import tempfile
from pathlib import Path
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from helpers.strategies.format_samples import fails
from hypothesis import given

from equipoise.balancer.requests.traces import json_objects, read_trace, trace_file

Turns = list[tuple[str, str]]
TURNS = st.lists(
    st.tuples(st.sampled_from(["human", "gpt", "system"]), st.text(max_size=30)), max_size=6
)


def conversation(turns: Turns) -> dict[str, object]:
    """A conversation as the file stores it."""
    return {
        "id": "a",
        "conversations": [{"from": speaker, "value": text} for speaker, text in turns],
    }


def requests(turns: Turns) -> list[tuple[int, int]]:
    """Estimated tokens of the prompt and the answer of each request."""
    token_counts = []
    for at, (speaker, turn_text) in enumerate(turns):
        before = sum(len(earlier_text) for _, earlier_text in turns[:at])
        if speaker == "gpt" and turn_text and before:
            token_counts.append((-(-before // 4), -(-len(turn_text) // 4)))
    return token_counts


@given(
    st.lists(TURNS, max_size=6),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.integers(1, 60),
    st.none() | st.integers(1, 8),
)
def test_sharegpt_trace_round_trips(
    more_conversations: list[Turns], indent: int | None, ascii: bool, piece: int, most: int | None
) -> None:
    conversations = [[("human", "What?"), ("gpt", "That.")], *more_conversations]
    text = json.dumps(
        [conversation(turns) for turns in conversations], indent=indent, ensure_ascii=ascii
    )
    with tempfile.TemporaryDirectory() as folder, patch.object(trace_file, "READ_BYTES", piece):
        path = Path(folder) / "a.json"
        path.write_bytes(text.encode(errors="surrogatepass") + b" \n")
        workload = read_trace(path, "sharegpt", most)
    expected = [pair for turns in conversations[:most] for pair in requests(turns)]
    assert list(zip(workload.prompts.tolist(), workload.outputs.tolist(), strict=True)) == expected
    answers = sum(speaker == "gpt" for turns in conversations[:most] for speaker, _ in turns)
    silent_answers = answers - len(expected)
    note = f"{silent_answers} answers had no text, or no prompt: dropped"
    assert workload.notes == (
        "tokens are estimated: 4 characters each",
        *([note] if silent_answers else []),
    )
    assert (workload.arrivals, workload.hashes) == (None, None)


GOOD = json.dumps(conversation([("human", "a"), ("gpt", "b")]))


def of_turn(turn: str) -> str:
    """A conversation of this turn."""
    return '{"conversations": [' + turn + "]}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "line 1: is not JSON: Expecting value"),
        (f"[{GOOD}", "line 1: is not JSON: the end of the file, expected ',' or ']'"),
        (f"[{GOOD}\n{GOOD}]", 'line 2: is not JSON: \'{"id"'),
        (f"[{GOOD},\n]", "line 2: is not JSON: Expecting value"),
        (f"[{GOOD},\n{GOOD[:-3]}", "line 2: is not JSON: Expecting"),
        (f"[{GOOD},\n" + '{\n"id": "a\1b"}]', "line 3: is not JSON: Invalid control character"),
        (f"[{GOOD}]\n\n[]", "line 3: '[]' after the end of the list"),
        (f"[\n{GOOD},\n5]", "line 3: is 5, expected an object"),
        (f"[\n{GOOD},\n" + "{}]", "line 3: has no conversations"),
        (
            f"[{GOOD},\n" + '{"conversations": "a"}]',
            "line 2: conversations is 'a', expected a list",
        ),
        (f"[{GOOD},\n" + of_turn("7") + "]", "line 2: is 7, expected an object"),
        (f"[{GOOD},\n" + of_turn("{}") + "]", "line 2: has no from"),
        (f"[{GOOD},\n" + of_turn('{"from": "gpt"}') + "]", "line 2: has no value"),
        (
            f"[{GOOD},\n" + of_turn('{"from": "gpt", "value": null}') + "]",
            "line 2: value is None, expected a string",
        ),
        (f"[{GOOD}, NaN]", "line 1: is not JSON: NaN is not a number of JSON"),
        (f"[{GOOD},\n" + "[" * 100_000, "line 2: is not JSON: it is nested too deep"),
        ("[]", "has no requests"),
        ("[" + of_turn('{"from": "human", "value": "a"}') + "]", "has no requests"),
        (b'[{"conversations": "\xff"}]', "line 1: is not UTF-8 after this line"),
    ],
)
def test_sharegpt_trace_names_bad_line(text: str | bytes, words: str, tmp_path: Path) -> None:
    assert fails(tmp_path / "a.json", text, read_trace).startswith(words)


def test_sharegpt_trace_bounds_memory_for_endless_object(tmp_path: Path) -> None:
    # What is no UTF-8 would be seen, if that much were read.
    text = b'[{"id": "' + b"a" * 10_000 + b"\xff"
    with (
        patch.object(json_objects, "MAX_OBJECT_CHARS", 100),
        patch.object(trace_file, "READ_BYTES", 50),
    ):
        what = fails(tmp_path / "a.json", text, read_trace)
    assert what.startswith("line 1: is not JSON: Unterminated string")
