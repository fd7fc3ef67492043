"""The argument parser of the command line, with the help text of every command."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equipoise import __version__
from equipoise.cli import (
    advise,
    bench,
    conformance_options,
    convert,
    engines,
    picker,
    plan,
    policy_server,
    record,
    replay,
    report,
    route,
    route_report,
    simulate,
)
from equipoise.cli.kinds import PATH
from equipoise.cli.option import Option
from equipoise.cli.option_parser import Parser, add_command, add_options, reader
from equipoise.cli.run_options import OPTIONS, default_of

DESCRIPTION = "Keeps Mixture-of-Experts serving in balance on any accelerator."
EXAMPLES = """\
examples:
  equipoise run                             # four ranks, shipped texts, a report
  equipoise run --ranks 2 --slots 36        # two ranks with four redundant experts
  equipoise run --text a.txt b.txt          # your own texts, one phase each
  equipoise run --variants local            # one way to serve instead of five
  equipoise run --config run.yaml --json figures.json
"""
RUN = """\
Serve real text through the shipped Mixture-of-Experts model on several ranks
while its kind switches, balance the experts online, and compare every output
with one process that does neither."""
CONFIG = """\
A configuration file is YAML with the long names as keys and underscores for
hyphens, such as `window_size: 4`; the command line overrides it.

exit code: 0 outputs identical and balancing exercised, 1 one of them not,
2 bad input, 3 the run failed, 130 interrupted, 128 + n ended by signal n"""
RECORD = """\
Serve real text as `run` does, once, and write how many rows every expert of every
layer took at every step, in a folder with a file for each rank (page Formats). Or
take what a finished run has counted, by --run."""
RECORD_EXAMPLES = """\
examples:
  equipoise record -o recorded/                      # 120 steps on four ranks
  equipoise record --range 40-80 -o recorded/        # of these, steps 40 to 79
  equipoise record --balance on -o recorded/         # while experts move
  equipoise record --run equipoise-run -o counts.npz what a run has counted

exit code: 0 recorded, 2 bad input, nothing was started or written, 3 it failed or
could not be written"""
PLAN = """\
Read how many rows every expert took, place the experts so that no rank has more
to do than others, and write the placement. STATS is a file or a folder, in any
format of the page Formats."""
PLAN_EXAMPLES = """\
examples:
  equipoise plan recorded/ --ranks 32 --slots 288 -o placement.json
  equipoise plan counts.npz --installed placement.json -o next.json
  equipoise plan counts.csv --ranks 8 --slots 64 --split even -o plan.yaml

exit code: 0 written, 2 bad input, nothing was written, 3 it could not be written"""
REPORT = """\
Say how evenly rows spread over ranks and over slots: mean, standard deviation
and imbalance; with experts in their order on consecutive ranks and, if given,
with a placement."""
REPORT_EXAMPLES = """\
examples:
  equipoise report recorded/ --ranks 32
  equipoise report recorded/ --placement placement.json --html report.html

exit code: 0 reported, 2 bad input, 3 something could not be written"""
ADVISE = """\
Say of recorded load whether balancing is worth it, with how many redundant slots
and on how many ranks; and, for given hardware and latency, how fast experts move
and when a move pays. A model, not a measurement: the page Advice has its formulas."""
ADVISE_EXAMPLES = """\
examples:
  equipoise advise recorded/ --ranks 32
  equipoise advise recorded/ --ranks 32 --hardware h200 --itl 50 \\
      --hidden 7168 --intermediate 2048
  equipoise advise counts.csv --installed placement.json --hardware mine.yaml \\
      --itl 50 --expert-bytes 24MiB --link host --json advice.json

exit code: 0 advised, 2 bad input, 3 something could not be written"""
REPLAY = """\
Replay recorded routing under the balancers of engines and under ours, step by step:
imbalance, step time, weights moved, pauses, KV cache and throughput of each; and when
to leave balancing off. A model, not a measurement: the page Replay has its formulas."""
REPLAY_EXAMPLES = """\
examples:
  equipoise replay routed/ --ranks 8 --experts 128
  equipoise replay counts.npy --ranks 32 --slots 256,288,320 --engine sglang,equipoise \\
      --hardware h200 --hidden 7168 --intermediate 2048 --itl 50
  equipoise replay per_pass.pt --ranks 8 --expert-bytes 18MiB --memory 60GiB \\
      --kv-bytes-per-token 96KiB --html replay.html

exit code: 0 replayed, 2 bad input, 3 something could not be written"""
CONVERT = """\
Read statistics or a placement, whichever IN is, and write it in another format.
What the format of OUT cannot carry is listed on standard error."""
CONVERT_EXAMPLES = """\
examples:
  equipoise convert placement.json moe_load_balancer.yaml
  equipoise convert recorded/ counts.csv
  equipoise convert map.npy placement.json --ranks 32

exit code: 0 written, 2 bad input, nothing was written, 3 it could not be written"""
ROUTE = """\
A proxy in front of several servers of the OpenAI API: binds each request to one of
them when it has a free slot, so that none makes the others wait. Needs
the extra `serve`: pip install '.[serve]' in a clone."""
ROUTE_EXAMPLES = """\
examples:
  equipoise route --config route.yaml
  equipoise route --workers http://127.0.0.1:8000 http://127.0.0.1:8001 --slots 128
  equipoise route --config route.yaml --port 9443 --tls-cert cert.pem --tls-key key.pem

exit code: 0 ended by a signal after all requests had ended, 1 some were cut
off, 2 bad input, 3 a part of it failed"""
PICKER = """\
An endpoint picker of the Gateway API Inference Extension: Envoy asks it which worker a
request goes to, and waits until one has a free slot. Needs the extra
`picker`: pip install '.[picker]' in a clone."""
PICKER_EXAMPLES = """\
examples:
  equipoise picker --workers http://10.0.0.1:8000 http://10.0.0.2:8000 --slots 128
  equipoise picker --endpoints-file endpoints.yaml --host 0.0.0.0
  equipoise picker --endpoints-name workers.default.svc --endpoints-ports 8000,8001

exit code: 0 ended by a signal, 1 requests that waited for a worker were refused then,
2 bad input, 3 a part of it failed"""
POLICY_SERVER = """\
Decides for several proxies or pickers in front of the same workers, as one would: start
each of them with --policy-server. While it is away they decide by their own
policies. Needs the extra `serve`: pip install '.[serve]' in a clone."""
POLICY_SERVER_EXAMPLES = """\
examples:
  equipoise policy-server
  equipoise route --workers http://10.0.0.1:8000 http://10.0.0.2:8000 --policy-server 127.0.0.1:9004
  equipoise policy-server --host 0.0.0.0 --policy-options lockstep=false

exit code: 0 ended by a signal, 2 bad input, 3 the policy failed"""
BENCH = """\
Send requests to a server of the OpenAI API, or to the proxy, and say how long it took
to answer: time to first token, time per output token, latency, throughput. Needs
the extra `serve`: pip install '.[serve]' in a clone."""
BENCH_EXAMPLES = """\
examples:
  equipoise bench serve --url http://127.0.0.1:9000 --concurrency 64 --requests 1000
  equipoise bench serve --url http://127.0.0.1:9000 --rate 12 --workload prop
  equipoise bench serve --url http://127.0.0.1:9000 --trace trace.csv --json figures.json

exit code: 0 all answered, 1 some failed, 2 bad input, nothing was sent, 3 the server does
not say which model it has"""
DOCTOR = "Say what was found on this machine, what is missing and why."


STATISTICS = "recorded statistics: a file or a folder"
ROUTING_TRACE = "recorded routing, by token or by step: a file or a folder"


def build_parser() -> Parser:
    """Every command that exists; parsing raises UsageError for bad input."""
    parser = Parser(
        prog="equipoise",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"equipoise {__version__}")
    # Not required: without any, help is shown, and an unknown option is named before.
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_run(commands)
    _add_record(commands)
    _add_conformance(commands)
    _add_plan(commands)
    _add_report(commands)
    _add_advise(commands)
    _add_replay(commands)
    _add_convert(commands)
    _add_route(commands)
    _add_route_report(commands)
    _add_picker(commands)
    _add_policy_server(commands)
    _add_bench(commands)
    _add_simulate(commands)
    _add_doctor(commands)
    return parser


def _add_run(commands: Any) -> None:
    command = add_command(
        commands,
        "run",
        "serve real text on several ranks, balanced, and report",
        RUN,
        f"{EXAMPLES}\n{CONFIG}",
    )
    _add_config_options(command, OPTIONS)


def _add_record(commands: Any) -> None:
    command = add_command(
        commands, "record", "count what every expert took", RECORD, RECORD_EXAMPLES
    )
    _add_config_options(command, record.OPTIONS)


def _add_conformance(commands: Any) -> None:
    command = add_command(
        commands,
        "conformance",
        "does a backend keep the contract, clause by clause?",
        conformance_options.DESCRIPTION,
        conformance_options.EXAMPLES.format(command="equipoise conformance"),
    )
    _add_config_options(command, conformance_options.OPTIONS)


def _add_plan(commands: Any) -> None:
    command = add_command(
        commands, "plan", "place experts by what was recorded", PLAN, PLAN_EXAMPLES
    )
    command.add_argument("statistics", type=reader(PATH), metavar="STATS", help=STATISTICS)
    _add_config_options(command, plan.OPTIONS)


def _add_report(commands: Any) -> None:
    command = add_command(
        commands, "report", "how evenly recorded rows spread", REPORT, REPORT_EXAMPLES
    )
    command.add_argument("statistics", type=reader(PATH), metavar="STATS", help=STATISTICS)
    _add_config_options(command, report.OPTIONS)


def _add_advise(commands: Any) -> None:
    command = add_command(
        commands, "advise", "is balancing worth it, and with what", ADVISE, ADVISE_EXAMPLES
    )
    command.add_argument("statistics", type=reader(PATH), metavar="STATS", help=STATISTICS)
    _add_config_options(command, advise.OPTIONS)


def _add_replay(commands: Any) -> None:
    about = "what each balancer would gain on recorded routing"
    command = add_command(commands, "replay", about, REPLAY, REPLAY_EXAMPLES)
    command.add_argument("trace", type=reader(PATH), metavar="TRACE", help=ROUTING_TRACE)
    _add_config_options(command, replay.OPTIONS)


def _add_convert(commands: Any) -> None:
    command = add_command(
        commands,
        "convert",
        "statistics and placements from format to format",
        CONVERT,
        CONVERT_EXAMPLES,
    )
    command.add_argument("source", type=reader(PATH), metavar="IN", help="what to read")
    command.add_argument("out", type=reader(PATH), metavar="OUT", help="what to write")
    _add_config_options(command, convert.OPTIONS)


def _add_route(commands: Any) -> None:
    command = add_command(
        commands, "route", "a proxy that balances requests over servers", ROUTE, ROUTE_EXAMPLES
    )
    _add_config_options(command, route.OPTIONS)


def _add_picker(commands: Any) -> None:
    about = "which worker a request goes to, for Envoy"
    command = add_command(commands, "picker", about, PICKER, PICKER_EXAMPLES)
    _add_config_options(command, picker.OPTIONS)


def _add_policy_server(commands: Any) -> None:
    about = "one policy for several proxies or pickers"
    command = add_command(commands, "policy-server", about, POLICY_SERVER, POLICY_SERVER_EXAMPLES)
    _add_config_options(command, policy_server.OPTIONS)


def _add_route_report(commands: Any) -> None:
    command = add_command(
        commands,
        "route-report",
        "where requests went, from the proxy's log",
        route_report.ROUTE_REPORT,
        route_report.ROUTE_REPORT_EXAMPLES,
    )
    command.add_argument("log", type=reader(PATH), metavar="LOG", help="the proxy's log")
    _add_config_options(command, route_report.OPTIONS)


def _add_bench(commands: Any) -> None:
    about = "how fast a server answers"
    bench_parser = commands.add_parser("bench", help=about, description=BENCH, allow_abbrev=False)
    subjects = bench_parser.add_subparsers(dest="subject", metavar="SUBJECT", required=True)
    serve = add_command(subjects, "serve", "requests to a server", BENCH, BENCH_EXAMPLES)
    _add_config_options(serve, bench.OPTIONS)


def _add_simulate(commands: Any) -> None:
    command = add_command(
        commands,
        "simulate",
        "which router of requests, by evidence",
        simulate.SIMULATE,
        simulate.SIMULATE_EXAMPLES,
    )
    _add_config_options(command, simulate.OPTIONS)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what this machine has, what is missing and why",
        description=f"{DOCTOR} Exit code 0 if an accelerator works; with the name of an engine, if"
        " every part of it that can be had can be switched on; 1 otherwise.",
        allow_abbrev=False,
    )
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write the findings there too")
    for name in engines.installed():
        doctor.add_argument(
            f"--{name}",
            action="store_true",
            dest=engines.argument_name(name),
            help=f"instead: whether the {name} that is installed can be served, part by part",
        )


def _add_config_options(command: Any, options: Sequence[Option]) -> None:
    """Options of a command that reads a configuration file too."""
    add_options(command, options, default_of)
    command.add_argument("--config", type=Path, metavar="FILE", help="read options from YAML")
