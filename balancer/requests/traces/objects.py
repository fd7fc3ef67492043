"""JSON objects with the fields that are expected of them."""

from json import JSONDecodeError, JSONDecoder

from equipoise.balancer.formats.numbers import WORD, short


def _constant(name: str) -> object:
    raise ValueError(f"{name} is not a number of JSON")


DECODER = JSONDecoder(parse_constant=_constant)


def decode(text: str, begin: int = 0) -> tuple[object, int]:
    """The value that begins there, and where it ends.

    Raises: JSONDecodeError where the text is no JSON, or ends too early; ValueError where it is
    nested too deep, or a number is too long.
    """
    try:
        return DECODER.raw_decode(text, begin)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def reason(error: ValueError) -> str:
    """Why a text is not JSON, in a few words."""
    return error.msg.removesuffix(" at") if isinstance(error, JSONDecodeError) else str(error)[:80]


def field(value: object, name: str) -> object:
    """A field of what should be an object. Raises `ValueError`."""
    if not isinstance(value, dict):
        raise ValueError(f"is {short(value)}, expected an object")
    if name not in value:
        raise ValueError(f"has no {name}")
    found: object = value[name]
    return found


def whole(value: object, name: str, least: int, most: int = WORD - 1) -> int:
    """A field that is an integer. Raises `ValueError`."""
    found = field(value, name)
    if type(found) is not int:
        raise ValueError(f"{name} is {short(found)}, expected a whole number")
    if not least <= found <= most:
        raise ValueError(f"{name} is {short(found)}, expected {least} to {most}")
    return found


def text(value: object, name: str) -> str:
    """A field that is a string. Raises `ValueError`."""
    found = field(value, name)
    if not isinstance(found, str):
        raise ValueError(f"{name} is {short(found)}, expected a string")
    return found


def entries(value: object, name: str) -> list[object]:
    """A field that is a list. Raises `ValueError`."""
    found = field(value, name)
    if not isinstance(found, list):
        raise ValueError(f"{name} is {short(found)}, expected a list")
    return found
