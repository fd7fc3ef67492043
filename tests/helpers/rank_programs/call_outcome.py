"""What a call came to, in JSON."""

from collections.abc import Callable
from typing import Any

from equipoise.hal.errors import EquipoiseError

Outcome = dict[str, Any]


def outcome(call: Callable[[], object]) -> Outcome:
    """The error that `call` raised ("" for none), and what it says."""
    try:
        call()
        kind, text = "", ""
    except EquipoiseError as error:
        kind, text = type(error).__name__, str(error)
    return {"error": kind, "text": text}
