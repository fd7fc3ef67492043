"""Kinds of option values that only `equipoise simulate` has."""

from equipoise.balancer.requests.catalogue import DEFAULT_LIMITS, FORMATS, STEP_MODELS, PrefillRule
from equipoise.cli.kinds import NAME, REAL, WHOLE, OptionKind, parse_choice

SATURATED = "saturated"
SAMPLINGS = "bootstrap", "shuffled", "recorded"
ARRIVALS = "poisson", "trace"
SWEEPS = "load", "workers"
WHEN_FULL = "queue", "hold"


def _load_of_text(text: str) -> object:
    return text if text == SATURATED else REAL.from_text(text)


def _load_of_yaml(value: object) -> object:
    return value if value == SATURATED else REAL.from_yaml(value)


def _names_of_text(text: str) -> tuple[str, ...]:
    return tuple(str(NAME.from_text(name.strip())) for name in text.split(","))


def _names_of_yaml(value: object) -> tuple[str, ...]:
    if isinstance(value, list) and value:
        return tuple(str(NAME.from_yaml(name)) for name in value)
    return _names_of_text(str(NAME.from_yaml(value)))


def _points_of_text(text: str) -> tuple[object, ...]:
    return tuple(REAL.from_text(word) for word in text.split(","))


def _points_of_yaml(value: object) -> tuple[object, ...]:
    if isinstance(value, list) and value:
        return tuple(REAL.from_yaml(item) for item in value)
    return (REAL.from_yaml(value),) if not isinstance(value, str) else _points_of_text(value)


def _slots_of_text(text: str) -> int | tuple[int, ...]:
    numbers = tuple(int(str(WHOLE.from_text(word.strip()))) for word in text.split(","))
    return numbers if len(numbers) > 1 else numbers[0]


def _slots_of_yaml(value: object) -> int | tuple[int, ...]:
    if isinstance(value, list) and value:
        return tuple(int(str(WHOLE.from_yaml(item))) for item in value)
    return _slots_of_text(value) if isinstance(value, str) else int(str(WHOLE.from_yaml(value)))


def _alignment_of_text(text: str) -> tuple[str, int]:
    name, colon, limit = text.partition(":")
    rule = PrefillRule(name)
    return name, int(str(WHOLE.from_text(limit))) if colon else DEFAULT_LIMITS[rule]


def _alignment_of_yaml(value: object) -> tuple[str, int]:
    return _alignment_of_text(str(NAME.from_yaml(value)))


FORMAT = parse_choice(tuple(FORMATS))
STEP_MODEL, SAMPLING = parse_choice(tuple(STEP_MODELS)), parse_choice(SAMPLINGS)
ARRIVAL, SWEEP, FULL = parse_choice(ARRIVALS), parse_choice(SWEEPS), parse_choice(WHEN_FULL)
LOAD = OptionKind("saturated or a number", _load_of_text, _load_of_yaml)
POLICY_NAMES = OptionKind("names with commas between", _names_of_text, _names_of_yaml)
POINTS = OptionKind("numbers with commas between", _points_of_text, _points_of_yaml)
SLOTS = OptionKind(
    "a whole number, or one a worker with commas between", _slots_of_text, _slots_of_yaml
)
ALIGNMENT = OptionKind(
    f"{', '.join(rule.value for rule in PrefillRule)}, and a limit in steps behind a colon",
    _alignment_of_text,
    _alignment_of_yaml,
)
