import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.demo.rank import _as_text


@given(st.text(max_size=12), st.data())
def test_prompt_and_continuation_rejoin_for_any_cut(text: str, data: st.DataObject) -> None:
    encoded_text = text.encode()
    cut = data.draw(st.integers(0, len(encoded_text)))
    prompt, continuation = _as_text(encoded_text[:cut], encoded_text[cut:])
    assert prompt + continuation == text


@pytest.mark.parametrize("cut", [4, 5])
def test_prompt_cut_character_goes_to_continuation(cut: int) -> None:
    encoded_text = "漢字".encode()
    assert _as_text(encoded_text[:cut], encoded_text[cut:]) == ("漢", "字")


@given(st.text(), st.integers(0, 3))
def test_prompt_begins_with_whole_character(text: str, cut: int) -> None:
    """A prompt may be cut from a text amid a character, whose remainder is dropped."""
    full_text = "漢" + text
    prompt, continuation = _as_text(full_text.encode()[cut:], b"")
    assert prompt + continuation == (full_text if cut == 0 else text)
