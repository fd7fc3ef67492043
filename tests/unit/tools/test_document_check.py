"""tools/check_docs.py reports names that nothing has, and code that cannot be pasted."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from check_docs import (
    EXEMPT,
    OTHERS_NAMES,
    OTHERS_OPTIONS,
    Code,
    all_options,
    block_problems,
    check,
    command_names,
    missing_names,
)
from check_tree import read_tree
from helpers.paths import ROOT

PROJECT = '[project]\nname = "mine"\n[project.optional-dependencies]\nserve = ["aiohttp"]\n'
MISSING_NAMES = {
    "equipoise serve --port 1": "no command is called serve",
    "equipoise plan --splits even": "equipoise plan has no option --splits",
    "--min-gains 0.1": "no command has the option --min-gains",
    "python benchmarks/shares.py --exchanges": "no command has the option --exchanges",
    "window_sizes": "window_sizes is in no code",
    "BalancerConfig.min_gains": "class BalancerConfig has no min_gains",
    "equipoise.hal.errors.NoSuchError": "equipoise.hal.errors.NoSuchError is not in the package",
    "equipoise.acelerators": "equipoise.acelerators is not in the package",
    "equipoise_route_room_tokens": "nothing exports the metric equipoise_route_room_tokens",
    "EQUIPOISE_OFF=1": "environment variable EQUIPOISE_OFF is not read",
}
NAMES = (
    "equipoise plan STATS --ranks N [--slots N]",
    "equipoise doctor --NAME",
    "equipoise bench serve --requests 10",
    "--min-gain 0.1",
    "python benchmarks/shares.py --exchange",
    "window_size: 4",
    "BalancerConfig.min_gain",
    "equipoise.hal.errors.EquipoiseError",
    "equipoise.accelerators",
    "equipoise_route_queued_requests",
    "EQUIPOISE_OFFLINE=1",
    "torch.cuda.is_available()",
)
BROKEN_BLOCKS = {
    ("bash", "$ equipoise run\n"): (0, "bash: a line that is pasted has no prompt"),
    ("bash", "equipoise run\nand look at the report\n"): (
        1,
        "bash: and is no command; prose begins with #",
    ),
    ("bash", "equipoise run '\n"): (0, "bash: bash: line 1: unexpected EOF"),
    ("bash", "cd a && equipoise run --rank 4\n"): (0, "equipoise run --rank 4: unknown option"),
    ("bash", "mpiexec -n 4 \\\n  equipoise run --ranks many\n"): (0, "equipoise run --ranks many:"),
    ("bash", "python -m equipoise plan\n"): (0, "equipoise plan: "),
    ("console", "$ equipoise runs\nserved\n"): (0, "equipoise runs: unknown command"),
    ("console", "equipoise run\n"): (0, "console: no line begins with a prompt"),
    ("", "$ equipoise run\n"): (0, "a transcript is a block of `console`"),
    ("text", "equipoise run\n"): (0, "commands are a block of `bash`"),
    ("text", "equipoise\n"): (0, "commands are a block of `bash`"),
    ("", "ranks: 4\nsteps: 8\n"): (0, "a configuration is a block of `yaml`"),
    ("python", "import equipoise\nprint(\n"): (1, "python: '(' was never closed"),
    ("yaml", "ranks: [4\n"): (0, "yaml: "),
    ("yaml", "ranks: 4\nsteps: 8\nrounds: 1\n"): (0, "yaml: equipoise "),
    ("json", "{a: 1}"): (0, "json: "),
    ("toml", "a = \n"): (0, "toml: "),
}
BLOCKS = (
    (
        "bash",
        "# prose\nequipoise run --ranks 4   # four\nOMP_NUM_THREADS=1 \\\n  equipoise doctor\n",
    ),
    ("bash", "VERSION=$(python -c 'print(1)')\npytest -m \"\" tests | xargs time\n"),
    ("bash", "pip install -c constraints.txt '.[serve,picker]' && equipoise route --help\n"),
    ("console", "$ equipoise plan a.npy --ranks 4 \\\n    -o b.json\nplanned\n"),
    ("yaml", "workers:\n  - {url: a}\nslots: 4\n"),
    ("text", "equipoise eplb_policy: 2 of 58 layers change\n"),
)


@pytest.fixture(scope="module")
def code() -> Code:
    return Code(ROOT, read_tree(ROOT).sources)


@pytest.mark.parametrize("span", MISSING_NAMES)
def test_name_that_nothing_has_is_reported(code: Code, span: str) -> None:
    assert [what for what in missing_names(span, code) if MISSING_NAMES[span] in what]


@pytest.mark.parametrize("span", NAMES)
def test_name_that_exists_is_accepted(code: Code, span: str) -> None:
    assert list(missing_names(span, code)) == []


@pytest.mark.parametrize(("language", "text"), BROKEN_BLOCKS)
def test_block_that_cannot_be_pasted_is_reported(code: Code, language: str, text: str) -> None:
    number, message = BROKEN_BLOCKS[language, text]
    found = list(block_problems(language, text, code))
    assert [what for line, what in found if line == number and what.startswith(message)], found


@pytest.mark.parametrize(("language", "text"), BLOCKS)
def test_block_that_can_be_pasted_is_accepted(code: Code, language: str, text: str) -> None:
    assert list(block_problems(language, text, code)) == []


def test_violations_have_page_and_line(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(
        "# A\n\n```bash\nequipoise run\nand then\n```\n\n    $ equipoise run\n\nSee `gone_name`.\n"
    )
    assert [str(violation) for violation in check(tmp_path)] == [
        "docs/page.md:5: bash: and is no command; prose begins with #",
        "docs/page.md:8: a transcript is a block of `console`",
        "docs/page.md:10: gone_name is in no code",
    ]


def test_install_from_an_index_or_of_no_extra_is_reported(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "README.md").write_text(
        "Type `pip install -U equipoise`, or `pip install '.[serve]'`.\n\n"
        "```bash\npip install -c constraints.txt '.[serve,plot]' && equipoise run\n```\n"
    )
    (tmp_path / "hal").mkdir()
    (tmp_path / "hal" / "a.py").write_text(
        "\nHOW = \"pip install 'equipoise[serve]'\"\nTOO = \"pip install '.[proxy]'\"\n"
    )
    clone = "no index has equipoise: `pip install .` in a clone, as `install_command` says"
    assert list(map(str, check(tmp_path))) == [
        f"README.md:1: {clone}",
        "README.md:4: pyproject.toml has no extra plot",
        f"hal/a.py:2: {clone}",
        "hal/a.py:3: pyproject.toml has no extra proxy",
    ]


def test_record_of_earlier_commit_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "README.md").write_text("`gone_name`, commit 0123abc; (there `gone_too`)\n")
    assert check(tmp_path) == []


def page_texts() -> Iterator[str]:
    """Documents that are checked."""
    for path, source in read_tree(ROOT).sources.items():
        if path.endswith(".md") and path not in EXEMPT:
            yield source.text


def test_exceptions_are_needed(code: Code) -> None:
    """A name that no page has, or that is ours by now, is removed from the lists."""
    text = "\n".join(page_texts())
    names = {name for names in OTHERS_NAMES.values() for name in names.split()}
    options = {option for options in OTHERS_OPTIONS.values() for option in options.split()}
    assert sorted(name for name in names | options if name not in text) == []
    assert sorted(options & all_options()) == []
    # An attribute may be the one of a class of theirs that has our class's name.
    assert sorted(names & code.words - {"execute_model"}) == []
    assert [page for page in EXEMPT if not (ROOT / page).exists()] == []


def test_commands_are_those_of_the_help() -> None:
    assert {"run", "plan", "policy-server", "route-report", "bench", "doctor"} <= command_names()
    assert {"--ranks", "--from", "--requests"} <= all_options()
