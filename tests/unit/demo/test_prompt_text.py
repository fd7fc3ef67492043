import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.demo.rank import _as_text


@given(st.text(max_size=12), st.data())
def test_prompt_and_continuation_rejoin_for_any_cut(text: str, data: st.DataObject) -> None:
    whole = text.encode()
    cut = data.draw(st.integers(0, len(whole)))
    prompt, continuation = _as_text(whole[:cut], whole[cut:])
    assert prompt + continuation == text


@pytest.mark.parametrize("cut", [4, 5])
def test_prompt_cut_character_goes_to_continuation(cut: int) -> None:
    whole = "漢字".encode()
    assert _as_text(whole[:cut], whole[cut:]) == ("漢", "字")


@given(st.text(), st.integers(0, 3))
def test_prompt_begins_with_whole_character(text: str, cut: int) -> None:
    """A prompt may be cut from a text amid a character, whose remainder is dropped."""
    whole = "漢" + text
    prompt, continuation = _as_text(whole.encode()[cut:], b"")
    assert prompt + continuation == (whole if cut == 0 else text)
