"""One option of a command, as every command declares its own."""

from dataclasses import dataclass

from equipoise.cli.option_kinds import OptionKind

REQUIRED = "required"
"""In place of a default: the command has none, and says so."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a command: a flag, and a key of its configuration file.

    Attributes:
        key: in a configuration file; the flag has hyphens for its underscores.
        kind: what values it takes, and how they are read from text and from YAML.
        group: heading under which `--help` shows it.
        help: what it sets.
        metavar: how `--help` shows its value; None for a switch.
        short: a short form of the flag.
        shown_default: default as `--help` shows it, where it is not that of a field of settings;
            or `REQUIRED`.
    """

    key: str
    kind: OptionKind
    group: str
    help: str
    metavar: str | None = None
    short: str = ""
    shown_default: str = ""

    @property
    def name(self) -> str:
        """The flag."""
        return "--" + self.key.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """The short form, if there is one, and the flag."""
        return (self.short, self.name) if self.short else (self.name,)
