"""Numbers, sizes and names as texts of tables and reports."""

from math import isnan


def printable(text: str) -> str:
    """Text without control characters: a file's name must not drive the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def pluralize(number: int, what: str) -> str:
    """So many of something, with thousands marked."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def format_number(value: float, shape: str = ".4f") -> str:
    """A number, or a dash where there is none."""
    return "-" if isnan(value) else format(value, shape)


def format_size(size: float) -> str:
    """Bytes in the largest binary unit that leaves a whole number of them."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"


def human_bytes(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def json_float(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return None if isnan(value) else float(value)
