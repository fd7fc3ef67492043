"""Where the text comes from: five kinds of file out of Debian packages, unpacked in one folder.

    apt-get download libpython3.11-stdlib libpython3.11-minimal rust-doc unicode-data tzdata \
        postgresql-15 postgresql-client-15
    for package in *.deb; do dpkg-deb -x "$package" sources; done

Nothing is downloaded here. Licences and versions: `src/equipoise/demo/text/ORIGINS.md`.
"""

import gettext
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

WHOLE_BOOK = "print.html"
"""The page that repeats all pages of a book."""


@dataclass(frozen=True)
class Kind:
    """One kind of text: which files are held out, which are trained on, and how to read one."""

    name: str
    held_out: tuple[str, ...]
    trained: tuple[str, ...]
    read: Callable[[Path], str]
    largest: int = 1024 * 1024
    """No file gives more training text than this, in bytes."""

    def held_out_files(self, root: Path) -> list[Path]:
        """In the order they are named; ValueError where one is missing."""
        return list(_matching_files(root, self.held_out))

    def trained_files(self, root: Path) -> list[Path]:
        """Sorted, without those held out."""
        held_out = set(self.held_out_files(root))
        return sorted(set(_matching_files(root, self.trained)) - held_out)


def _matching_files(root: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        files = sorted(
            path for path in root.glob(pattern) if path.is_file() and path.name != WHOLE_BOOK
        )
        if not files:
            raise ValueError(f"no file matches {pattern} below {root}: unpack the packages there")
        yield from files


class _Prose(HTMLParser):
    """Headings, paragraphs and list items of a page's <main>, without code blocks."""

    TEXT_TAGS = frozenset(("p", "li", "h1", "h2", "h3", "h4"))

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._main = False
        self._block = 0
        self._code = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._main |= tag == "main"
        self._block += tag in self.TEXT_TAGS
        self._code += tag in ("pre", "script")

    def handle_endtag(self, tag: str) -> None:
        self._main &= tag != "main"
        self._code -= tag in ("pre", "script")
        if tag in self.TEXT_TAGS:
            self._block -= 1
            self.text += "\n"

    def handle_data(self, data: str) -> None:
        if self._main and self._block and not self._code:
            self.text += data


def read_plain(path: Path) -> str:
    """A text file as it is; '' where it is not UTF-8."""
    return path.read_text(errors="ignore")


def read_table(path: Path) -> str:
    """A data file without its lines of pure comment, which are the same in many files."""
    lines = read_plain(path).splitlines()
    return "\n".join(line for line in lines if line and not line.startswith("#")) + "\n"


def read_page(path: Path) -> str:
    """The prose of an HTML page."""
    parser = _Prose()
    parser.feed(path.read_text())
    lines = (line.rstrip() for line in parser.text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def read_catalogue(path: Path) -> str:
    """The translated messages of a compiled gettext catalogue, one after another."""
    with path.open("rb") as file:
        catalogue: dict[object, str] = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    return "".join(text.rstrip() + "\n" for key, text in catalogue.items() if key != "")


_PYTHON = "usr/lib/python3.11"
_BOOKS = "usr/share/doc/rust-doc/html"
_CHINESE = "usr/share/locale/zh_CN/LC_MESSAGES"
_TAIWAN = "usr/share/locale/zh_TW/LC_MESSAGES"
_UNICODE = "usr/share/unicode"
_TABLES = ("Scripts", "LineBreak", "VerticalOrientation", "DerivedAge", "PropList", "UnicodeData")

KINDS = (
    Kind(
        "python",
        tuple(
            f"{_PYTHON}/{name}.py"
            for name in ("csv", "shlex", "queue", "heapq", "sched", "glob", "textwrap", "shelve")
        ),
        tuple(
            f"{_PYTHON}/{name}.py"
            for name in ("*", *(f"{p}/*" for p in ("asyncio", "email", "http", "logging", "json")))
        ),
        read_plain,
    ),
    Kind(
        "english",
        (f"{_BOOKS}/nomicon/*.html",),
        tuple(f"{_BOOKS}/{p}" for p in ("book/ch*.html", "reference/**/*.html", "rustc/**/*.html")),
        read_page,
    ),
    Kind(
        "chinese",
        tuple(
            f"{_CHINESE}/{name}-15.mo"
            for name in ("plpgsql", "pg_upgrade", "pg_rewind", "initdb", "pg_basebackup", "pg_ctl")
        ),
        (f"{_CHINESE}/*.mo", f"{_TAIWAN}/postgres-15.mo", f"{_TAIWAN}/psql-15.mo"),
        read_catalogue,
    ),
    Kind(
        "tables",
        (f"{_UNICODE}/EastAsianWidth.txt", f"{_UNICODE}/extracted/DerivedGeneralCategory.txt"),
        (
            *(f"{_UNICODE}/{name}.txt" for name in (*_TABLES, "DerivedCoreProperties")),
            "usr/share/zoneinfo/tzdata.zi",
        ),
        read_table,
        largest=96 * 1024,
    ),
)
