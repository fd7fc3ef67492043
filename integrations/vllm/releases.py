"""An engine as it is installed: by which names, and which of its releases were tested."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from equipoise.hal.errors import EngineUnsupported


@dataclass(frozen=True)
class Release:
    """What is known of an engine's releases.

    Attributes:
        engine: as it calls itself.
        distributions: names under which it is installed.
        tested: versions that the tests run with.
        untested: variable of the environment: a version to take although it was not tested.
    """

    engine: str
    distributions: tuple[str, ...]
    tested: tuple[str, ...]
    untested: str

    def installed(self) -> str:
        """The version that is installed, without its local part. Raises `EngineUnsupported`."""
        for name in self.distributions:
            try:
                return version(name).partition("+")[0]
            except PackageNotFoundError:
                continue
        names = ", ".join(self.distributions)
        raise EngineUnsupported(f"{self.engine} is not installed: none of {names} is")

    def problem(self, found: str, environment: Mapping[str, str]) -> str | None:
        """What is wrong with a version, in one line; None if it was tested, or is accepted."""
        if found in (*self.tested, environment.get(self.untested)):
            return None
        return f"version {found} was not tested ({self.untested}={found} takes it all the same)"

    def refuse(self, found: str, wrong: Sequence[str]) -> None:
        """Raises `EngineUnsupported` if anything is wrong with a version: one error for all."""
        if wrong:
            raise EngineUnsupported(
                f"equipoise cannot serve {self.engine} {found} "
                f"(tested: {', '.join(self.tested)}): "
                + "; ".join(wrong)
                + "; nothing of it was changed"
            )
