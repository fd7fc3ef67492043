"""Checks that documents name only what exists, and that their code can be pasted.

    python tools/check_docs.py [ROOT]

Run by `tox -e docs`; prints each violation as `path:line: text`. Of code in a sentence it checks
commands and options of `equipoise`, options of this repository's scripts, identifiers, metrics,
environment variables, dotted names of the package, and `Class.attribute`. Of blocks:

* `bash`: it parses, no line begins with a prompt or is prose, `equipoise` accepts its commands;
* `console`, a transcript: the same of every line behind `$ `;
* `python`, `yaml`, `toml`, `json`: it parses;
* a block without a language, or of plain `text`, holds no command: it would not be checked.

Options are those that `--help` of each command shows. tools/check_tree.py checks paths, links,
clauses and environments of tox; mkdocs checks the navigation and the links between pages.
"""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml
from check_tree import FORMERLY, RECORD, Source, Violation, read_tree

PAGES = re.compile(
    r"(README|CONTRIBUTING|SECURITY)\.md|(docs|conformance|examples|\.github)/.*\.md"
)
EXEMPT = {
    "docs/design/renamed.md": "maps old names to new ones",
    "docs/deep-results.md": "records commands as they were at the commits that they ran at",
}
PROGRAMS = frozenset(
    """
    . awk bash cd cmake cp curl docker envoy equipoise equipoise-conformance exec export git kill
    kubectl mkdir mpiexec npusim perf pip podman pytest python python3 ray serve source sudo taskset
    time tox torchrun vllm xargs find
    """.split()  # noqa: SIM905
)
"""What a line of a block may begin with; anything else is prose, or a typing error."""
ALSO_ENGLISH = frozenset({"exec", "find", "serve", "source", "time"})
"""Programs that a line of prose may begin with, too."""
SHELL_WORDS = frozenset({"for", "do", "done", "if", "then", "fi", "while", "set", "wait", "(", "{"})
OTHERS_OPTIONS = {
    "vLLM": """--additional-config --api-server-count --data-parallel-hybrid-lb --data-parallel-size
        --elastic-ep-backend --enable-eplb --enable-expert-parallel --enable-fault-tolerance
        --enforce-eager --eplb-config --gpu-memory-utilization --headless --load-format
        --max-num-seqs --pipeline-parallel-size --scheduling-policy --tensor-parallel-size
        --worker-cls""",
    "SGLang": """--enable-metrics --enable-prefill-delayer --enable-return-routed-experts --ep-size
        --ep-dispatch-algorithm --ep-num-redundant-experts --eplb-algorithm --init-expert-location
        --eplb-min-rebalancing-utilization-threshold --eplb-rebalance-layers-per-chunk
        --model-path --moe-a2a-backend --tp""",
    "torchrun": "--max-restarts",
    "tox, pip, pytest": "-- --no-deps",
}
"""Options of programs that are not ours."""
OTHERS_NAMES = {
    "pip": "PIP_EXTRA_INDEX_URL PIP_FIND_LINKS",
    "prometheus_client": "process_resident_memory_bytes",
    "W&B": "WANDB_MODE",
    "CANN, torch_npu and op-plugin": """aclrtReserveMemAddress histogram_v2_scalar npu_format_cast
        process_non_blocking_copy test_aclgraph_multi_stream CallbackLaunch
        StreamBeginCapture StreamEndCapture THNPUCachingHostAllocator""",
    "CUDA and NCCL": """cudaMalloc cuMemcpyBatchAsync maxCTAs ncclCommMemStats
        NCCL_LAUNCH_ORDER_IMPLICIT NCCL_RUNTIME_CONNECT""",
    "MPI": "MPI_Finalize",
    "PyTorch": """getMemoryInfo materialize_cow_storage torch_openreg DeviceGuardImplInterface
        ProcessGroupNCCL""",
    "Envoy": "external_processor",
    "Ray": """deployment_config max_queued_requests on_new_queue_len_info
        ray_equipoise_ray_choices_total serve_deployment_queued_queries
        serve_request_router_fulfillment_time_ms ActorDiedError""",
    "vLLM": "execute_dummy_batch execute_model run_multi_api_server torch_nccl EngineDeadError",
    "vllm-ascend": """compose_expert_update_info_greedy compute_and_set_moe_load
        constraint_expert_local_exchange eplb_heat_collection_stage forward_before forward_end
        update_iteration D2DExpertWeightLoader""",
    "SGLang": """rebalance_layers_per_chunk SGLANG_LOG_EXPERT_LOCATION_METADATA
        SGLANG_OPT_DEEPGEMM_MEGA_GATE""",
    "TensorRT-LLM": "computeAndUpdateThread updateLoadFactorKernel MoeLoadBalancerConfig",
    "DeepEP": "ElasticBuffer",
    "put together in balancer/observe/log_lines.py": """staged_seconds transferring_seconds
        updating_seconds""",
    "an alert that the page itself declares": "LoadUneven",
    "examples of names of tests": "test_commit_waits_for_registered_readers",
    "gone, and listed as what was": "list_tables staging_mib stall_s target_imbalance",
}
"""Identifiers that no code here has, by whose they are."""
CODE_FOLDERS = (
    *("hal/", "backends/", "balancer/", "pipeline/", "integrations/", "src/", "csrc/", "tests/"),
    *("examples/", "benchmarks/", "tools/", "conformance/", ".ci/"),
)
NO_EVIDENCE = ("tests/unit/tools/", "tools/check_docs.py")
"""They have names on purpose that nothing else has."""
PRODUCT_FOLDERS = CODE_FOLDERS[:7]
CODE_SUFFIXES = frozenset({".py", ".pyi", ".cpp", ".h", ".toml", ".ini", ".yaml", ".yml", ".sh"})
ROOT_CODE = frozenset({"pyproject.toml", "tox.ini", "setup.py", "mkdocs.yml", "toxfile.py"})
FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^|\n)\n((?: {4}[^\n]*\n(?:\n(?= {4}))*)+)")
SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
IDENTIFIER = re.compile(r"(?<![\w/.%$-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
PLAIN_SPAN = re.compile(r"[\w.()=, \[\]\"'{}:*+-]+")
METRIC = re.compile(r"\bequipoise(?:_[a-z0-9]+)+\b")
COMPONENT = re.compile(r"equipoise_(?:(?:route|picker|policy|vllm|sglang|ray)_)?")
VARIABLE = re.compile(r"\bEQUIPOISE(?:_[A-Z0-9]+)+\b")
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*|(?<![\w-])--(?= |$)")
DECLARED_OPTION = re.compile(r"\"(--[a-z][\w-]*)\"")
SCRIPT_FOLDERS = ("benchmarks/", "tools/", "examples/", "tests/deep/", "tests/simulators/")
LOGGERS = frozenset(f"equipoise.{name}" for name in ("rebalances", "balancedness", "memory"))
SCRIPT = re.compile(r"(?:benchmarks|tools|examples|tests)/[\w/.-]+\.py")
EXTRA = re.compile(r"pip install [^`\n&|;]*?(?:['\" ]\.|/equipoise)\[([\w,]+)\]")
FROM_AN_INDEX = re.compile(r"pip install (?:-\S+ )*['\"]?equipoise\b")
"""No index has this package: under its name there would be somebody else's."""
COMMAND_ROW = re.compile(r"^[ │|]+([a-z][a-z-]+)(?: {2,}\S| *$)", re.MULTILINE)
"""What a long name does stands in the next line."""
ASSIGNMENT = re.compile(r"\w+=")
PARSERS: dict[str, Callable[[str], object]] = {
    "yaml": yaml.safe_load,
    "json": json.loads,
    "toml": tomllib.loads,
}
KEY_LINE = re.compile(r"[a-z_]+: *[\w\[{\"]|  +\S|$")
PROMPT = "$ "


# --- the command line, as it describes itself ---


def run_command_line(arguments: Sequence[str]) -> tuple[int, str]:
    """Exit code and both outputs of `equipoise`, in this process."""
    from equipoise.cli.main import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, output.getvalue()


@cache
def help_text(command: tuple[str, ...]) -> str | None:
    """What `--help` of a command shows, and `--help-all` where there is one; None if no such."""
    code, text = run_command_line([*command, "--help"])
    if code:
        return None
    code, longer = run_command_line([*command, "--help-all"])
    return text if code else text + longer


@cache
def command_names() -> frozenset[str]:
    """Every command."""
    names = set(COMMAND_ROW.findall(help_text(()) or ""))
    return frozenset(name for name in names if help_text((name,)) is not None)


@cache
def options_of(command: tuple[str, ...]) -> frozenset[str]:
    """Options of a command, and of its subcommands."""
    text = help_text(command) or ""
    # Behind a word that is an argument of the command stands the help of the command itself.
    subcommands = (
        name
        for name in COMMAND_ROW.findall(text)
        if help_text((*command, name)) not in (None, text)
    )
    below = (options_of((*command, name)) for name in subcommands) if command else ()
    return frozenset(OPTION.findall(text)).union(*below)


@cache
def all_options() -> frozenset[str]:
    """Options of all commands."""
    return options_of(()).union(*(options_of((name,)) for name in command_names()))


def refusal(arguments: Sequence[str]) -> str | None:
    """Why `equipoise` does not accept a command line; None where it does. Nothing is run."""
    from equipoise.cli.parser import build_parser
    from equipoise.hal.errors import UsageError

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            build_parser().parse_args(arguments)
    except UsageError as error:
        return str(error)
    except SystemExit:
        return None  # --help and --version
    return None


# --- what exists in the code ---


@dataclass(frozen=True)
class Code:
    """The sources of a repository, and the names in them."""

    root: Path
    sources: dict[str, Source]

    @cached_property
    def files(self) -> list[Source]:
        """All code, tests included."""
        return [
            source
            for path, source in self.sources.items()
            if source.suffix in CODE_SUFFIXES
            and (path.startswith(CODE_FOLDERS) or path in ROOT_CODE)
            and not path.startswith(NO_EVIDENCE)
        ]

    @cached_property
    def words(self) -> frozenset[str]:
        """Every word of the code, and names of its files."""
        texts = (file.text for file in self.files)
        found = (re.findall(r"[A-Za-z_]\w*", text) for text in texts)
        stems = {Path(file.path).stem for file in self.files}
        return frozenset(word for words in found for word in words) | stems

    @cached_property
    def product(self) -> list[Source]:
        """Code of the package."""
        return [file for file in self.files if file.path.startswith(PRODUCT_FOLDERS)]

    @cached_property
    def strings(self) -> frozenset[str]:
        """Words within quotes in the product: metrics and variables are named there."""
        quoted = (re.findall(r'"(\w+)[":= {]', file.text) for file in self.product)
        return frozenset(word for found in quoted for word in found)

    @cached_property
    def script_options(self) -> frozenset[str]:
        """Options that scripts of this repository declare."""
        scripts = (file for file in self.files if file.path.startswith(SCRIPT_FOLDERS))
        return frozenset(
            option for file in scripts for option in DECLARED_OPTION.findall(file.text)
        )

    @cached_property
    def project(self) -> Mapping[str, Any]:
        """The table `project` of pyproject.toml."""
        return dict(tomllib.loads(self.sources["pyproject.toml"].text)["project"])

    @cached_property
    def classes(self) -> dict[str, list[tuple[str, str]]]:
        """Bases and text of every class, by name; the text runs up to the next class."""
        found: dict[str, list[tuple[str, str]]] = {}
        for file in self.product:
            if file.suffix in (".py", ".pyi"):
                parts = re.split(r"^ *class (\w+)(\(.*?\))?:", file.text, flags=re.M | re.S)
                for name, bases, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
                    found.setdefault(name, []).append((bases or "", body))
        return found

    def has_attribute(self, name: str, attribute: str) -> bool:
        """Whether a class of that name, or a base of it, has a word; true of classes of others."""
        for bases, body in self.classes[name]:
            inherited = re.findall(r"\w+", bases)
            if re.search(rf"\b{attribute}\b", body):
                return True
            if any(base not in self.classes for base in inherited if base not in OWN_BASES):
                return True
            if any(
                self.has_attribute(base, attribute) for base in inherited if base in self.classes
            ):
                return True
        return False

    def has_symbol(self, dotted: str) -> bool:
        """Whether `equipoise.a.b.c` is a module, or a name in one."""
        parts = dotted.split(".")[1:]
        place = self.root / "src" / "equipoise"
        while parts and (place / parts[0]).is_dir():
            place /= parts.pop(0)
        if not parts:
            return True
        module = place / f"{parts[0]}.py"
        if module.is_file():
            parts.pop(0)
        else:
            module = place / "__init__.py"
        text = module.read_text("utf-8") if module.is_file() else ""
        return all(re.search(rf"\b{part}\b", text) for part in parts[:1])


OWN_BASES = frozenset({"Protocol", "Enum", "StrEnum", "IntEnum", "Exception", "NamedTuple", "str"})
"""Bases of others that bring no attribute of a document."""


# --- rules of code in a sentence ---


def missing_names(span: str, code: Code) -> Iterator[str]:
    """Names in one piece of code that are neither ours nor known as those of others."""
    if span.startswith("equipoise "):
        yield from command_problems(span)
        return
    yield from option_problems(span, code)
    yield from metric_problems(span, code)
    for variable in VARIABLE.findall(span):
        if variable not in code.strings and variable not in code.words:
            yield f"environment variable {variable} is not read"
    if not PLAIN_SPAN.fullmatch(span):
        return
    for dotted in IDENTIFIER.findall(span):
        yield from identifier_problems(dotted, code)


def identifier_problems(dotted: str, code: Code) -> Iterator[str]:
    """A dotted name of which a part is in no code."""
    if METRIC.fullmatch(dotted) or VARIABLE.fullmatch(dotted):
        return
    if dotted.startswith("equipoise."):
        if not (dotted in LOGGERS | entry_point_groups(code) or code.has_symbol(dotted)):
            yield f"{dotted} is not in the package"
        return
    name, _, attribute = dotted.partition(".")
    if attribute and name in code.classes and "." not in attribute:
        if not code.has_attribute(name, attribute) and attribute not in others_names():
            yield f"class {name} has no {attribute}"
        return
    for part in dotted.split("."):
        is_name = "_" in part.strip("_") or re.search("[a-z][A-Z]", part)
        if is_name and part not in code.words and part not in others_names():
            yield f"{part} is in no code"


def entry_point_groups(code: Code) -> set[str]:
    """Groups of entry points that the project declares."""
    return set(code.project.get("entry-points", {}))


@cache
def others_names() -> frozenset[str]:
    """All of `OTHERS_NAMES`."""
    return frozenset(name for names in OTHERS_NAMES.values() for name in names.split())


def metric_problems(span: str, code: Code) -> Iterator[str]:
    """Metrics that nothing exports."""
    for metric in METRIC.findall(span):
        name = COMPONENT.sub("", metric, count=1)
        spellings = {metric, name, name.removesuffix("_total"), metric.removesuffix("_total")}
        if not spellings & code.strings:
            yield f"nothing exports the metric {metric}"


def option_problems(span: str, code: Code) -> Iterator[str]:
    """Options that neither a command, nor a script, nor a program of others has."""
    if not (span.startswith("-") or SCRIPT.search(span)):
        return
    others = " ".join(OTHERS_OPTIONS.values()).split()
    known = all_options() | code.script_options | frozenset(others)
    for option in OPTION.findall(span):
        if option.startswith("--") and option not in known:
            yield f"no command has the option {option}"


def command_problems(span: str) -> Iterator[str]:
    """A command of `equipoise` with placeholders: it exists, and has the options."""
    words = span.split()[1:]
    command: tuple[str, ...] = ()
    while words and re.fullmatch("[a-z][a-z-]*", words[0]) and help_text((*command, words[0])):
        command = (*command, words.pop(0))
    if not command and words and not words[0].startswith("-"):
        # `equipoise eplb_policy: ...` is a line of a log, and `equipoise ...:` how an error begins.
        if "_" not in words[0] and not span.endswith(":"):
            yield f"`{span}`: no command is called {words[0]}"
        return
    for word in words:
        option = word.partition("=")[0].strip("[]")
        if re.fullmatch("--[a-z][a-z-]*", option) and option not in options_of(command):
            yield f"`{span}`: equipoise {' '.join(command)} has no option {option}"


# --- rules of blocks ---


def block_problems(language: str, text: str, code: Code) -> Iterator[tuple[int, str]]:
    """What is wrong with a block, and in which of its lines, counted from 0."""
    match language:
        case "python" | "py":
            try:
                compile(text, "block", "exec")
            except SyntaxError as error:
                yield (error.lineno or 1) - 1, f"python: {error.msg}"
        case "yaml" | "json" | "toml":
            try:
                PARSERS[language](text)
            except (yaml.YAMLError, ValueError) as error:
                yield 0, f"{language}: {' '.join(str(error).split())}"
            else:
                yield from ((0, what) for what in key_problems(language, text))
        case "bash" | "sh":
            yield from script_problems(text, code)
        case "console":
            yield from transcript_problems(text, code)
        case "":
            yield from unlabelled_problems(text)
        case _:
            yield from command_in_text(text)


def key_problems(language: str, text: str) -> Iterator[str]:
    """Keys of a configuration file of `equipoise` that its command does not have."""
    content = yaml.safe_load(text) if language == "yaml" else None
    keys = {str(key) for key in content} if isinstance(content, dict) else set()
    known = {
        name: {option[2:].replace("-", "_") for option in options_of((name,))}
        for name in command_names()
    }
    command = max(known, key=lambda name: len(known[name] & keys))
    if known[command] & keys:
        for key in sorted(keys - known[command]):
            yield f"yaml: equipoise {command} has no key {key}"


def unlabelled_problems(text: str) -> Iterator[tuple[int, str]]:
    """A configuration or commands in a block that is not said to be any."""
    lines = text.splitlines()
    if len(lines) > 1 and all(KEY_LINE.match(line) for line in lines):
        yield 0, "a configuration is a block of `yaml`"
    yield from command_in_text(text)


def command_in_text(text: str) -> Iterator[tuple[int, str]]:
    """Commands in a block that is not said to have any."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(PROMPT):
            yield number, "a transcript is a block of `console`"
            return
    words = lines[0].split() if lines else []
    while words and ASSIGNMENT.match(words[0]):
        words.pop(0)
    # `equipoise eplb_policy: ...` is a line of a log.
    logged = words[:1] == ["equipoise"] and "_" in "".join(words[1:2])
    if words and words[0] in PROGRAMS - ALSO_ENGLISH and not logged:
        yield 0, "commands are a block of `bash`"


def transcript_problems(text: str, code: Code) -> Iterator[tuple[int, str]]:
    """Problems of the commands behind prompts; the other lines are output."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        first = number
        if lines[number].startswith(PROMPT):
            script = [lines[number].removeprefix(PROMPT)]
            while script[-1].endswith("\\") and number + 1 < len(lines):
                number += 1
                script.append(lines[number])
            yield from ((first, what) for _, what in script_problems("\n".join(script), code))
        number += 1
    if not any(line.startswith(PROMPT) for line in lines):
        yield 0, "console: no line begins with a prompt"


def script_problems(text: str, code: Code) -> Iterator[tuple[int, str]]:
    """What bash, `equipoise` or pip would refuse of a script."""
    checked = subprocess.run(
        ["bash", "-n"], input=text, capture_output=True, text=True, check=False
    )
    if checked.returncode:
        yield 0, f"bash: {' '.join(checked.stderr.split())}"
        return
    for number, line in enumerate(text.splitlines()):
        if line.lstrip().startswith(PROMPT):
            yield number, "bash: a line that is pasted has no prompt"
            return
    for number, words in shell_commands(text):
        yield from ((number, what) for what in call_problems(words, code))


def shell_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Line and words of each command, without assignments; lines are joined at backslashes."""
    joined = text.replace("\\\n", " \0")
    number = 0
    for line in joined.split("\n"):
        lexer = shlex.shlex(line.replace("\0", ""), posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        try:
            tokens = [*lexer, ";"]
        except ValueError:  # a quotation over several lines, which bash accepts
            tokens = [";"]
        for token in tokens:
            if token and set(token) <= set("&|;"):
                computed = words and re.match(r"\w+=\$\(", words[0])
                while words and (ASSIGNMENT.match(words[0]) or words[0] in SHELL_WORDS):
                    words.pop(0)
                if words and not computed:
                    yield number, words
                words = []
            else:
                words.append(token)
        number += 1 + line.count("\0")


def call_problems(words: Sequence[str], code: Code) -> Iterator[str]:
    """What is wrong with one command."""
    program = words[0].rpartition("/")[2]
    if program not in PROGRAMS and not (code.root / words[0]).is_file():
        yield f"bash: {words[0]} is no command; prose begins with #"
        return
    arguments = equipoise_arguments(words)
    if arguments is not None and (why := refusal(arguments)):
        yield f"equipoise {' '.join(arguments)}: {why}"
    if SCRIPT.fullmatch(words[1] if program.startswith("python") and len(words) > 1 else ""):
        yield from option_problems(" ".join(words), code)


def equipoise_arguments(words: Sequence[str]) -> list[str] | None:
    """Arguments of `equipoise`, whatever starts it; None where it is not started."""
    for number, word in enumerate(words):
        if word == "equipoise" and (number == 0 or words[number - 1] not in ("install", "show")):
            end = next((i for i, each in enumerate(words) if set(each) <= set("<>")), len(words))
            return list(words[number + 1 : end])
    return None


# --- pages ---


def page_violations(source: Source, code: Code) -> Iterator[Violation]:
    """Everything that is wrong with one page."""
    text = source.text
    yield from install_violations(source, code)
    for match in FENCE.finditer(text):
        block = textwrap.dedent(match[3])
        for number, what in block_problems(match[2], block, code):
            yield source.violation(source.line_of(match.start(3)) + number, what)
    # Lines stay where they are, so that violations have their numbers.
    rest = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)

    def violation(position: int, what: str, lines: int = 0) -> Violation:
        return source.violation(rest.count("\n", 0, position) + 1 + lines, what)

    for match in INDENTED.finditer(rest):
        for number, what in unlabelled_problems(textwrap.dedent(match[1])):
            yield violation(match.start(1), what, number)
    for match in SPAN.finditer(rest):
        if RECORD.match(rest, match.end()) or rest.endswith(FORMERLY, 0, match.start()):
            continue
        for what in missing_names(" ".join(match[1].split()), code):
            yield violation(match.start(), what)


@contextlib.contextmanager
def declared_entry_points(project: Mapping[str, Any]) -> Iterator[None]:
    """Entry points as after an installation: `doctor` has an option for each engine among them."""
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder, f"{project['name']}-0.dist-info")
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: 0\n")
        lines = []
        for group, points in project.get("entry-points", {}).items():
            lines += [f"[{group}]", *(f"{name} = {place}" for name, place in points.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)


def install_violations(source: Source, code: Code) -> Iterator[Violation]:
    """Lines that tell people to install what is not published, or an extra that there is not."""
    for match in EXTRA.finditer(source.text):
        for extra in set(match[1].split(",")) - set(code.project["optional-dependencies"]):
            text = f"pyproject.toml has no extra {extra}"
            yield source.violation(source.line_of(match.start()), text)
    for match in FROM_AN_INDEX.finditer(source.text):
        text = "no index has equipoise: `pip install .` in a clone, as `install_command` says"
        yield source.violation(source.line_of(match.start()), text)


def check(root: Path) -> list[Violation]:
    """Violations of all pages, sorted."""
    code = Code(root, read_tree(root).sources)
    pages = (
        source
        for path, source in code.sources.items()
        if PAGES.fullmatch(path) and path not in EXEMPT
    )
    with declared_entry_points(code.project):
        found = {violation for page in pages for violation in page_violations(page, code)}
    for source in code.product:
        found |= set(install_violations(source, code))
    return sorted(found)


def main(arguments: list[str]) -> int:
    """Prints what `check` finds; the exit status is 1 if it finds anything."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    violations = check(root)
    print(*violations, sep="\n", end="\n" if violations else "")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
