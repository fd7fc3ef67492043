"""What vLLM's runners read of an EPLB state is there, and what they call is ours.

The list of symbols checks what we call; this checks what calls us.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from equipoise.integrations.vllm.settings import EplbSettings

pytestmark = pytest.mark.filterwarnings("ignore")
ATTRIBUTE = re.compile(r"(?<!@)\b(?:eplb_state|self\.state)\.([a-z_]\w*)")
INHERITED = {"is_async", "should_record_tensor"}
"""Fields that vLLM's own constructor sets: no thread of its own, and no switch that warm-ups flip,
since the first announced forward discards what was counted before."""


def attributes_read() -> set[str]:
    """Of a state, by all modules of vLLM's workers."""
    import vllm.v1.worker

    folder = Path(vllm.v1.worker.__path__[0])
    texts = (path.read_text("utf-8") for path in folder.rglob("*.py"))
    return {name for text in texts if "eplb" in text for name in ATTRIBUTE.findall(text)}


def test_state_has_every_attribute_that_runners_read() -> None:
    from equipoise.integrations.vllm.eplb.state import EquipoiseEplbState

    names = attributes_read()
    assert {"add_model", "step", "prepare_forward"} <= names
    state = EquipoiseEplbState(SimpleNamespace(), torch.device("cpu"), EplbSettings(), None)
    assert {name for name in names if not hasattr(state, name)} == set()
    assert names - set(vars(EquipoiseEplbState)) <= INHERITED
    assert (state.is_async, getattr(state, "should_record_tensor", None)) == (False, None)
