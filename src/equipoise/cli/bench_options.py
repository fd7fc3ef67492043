"""The options of `equipoise bench serve`: each is a flag and a key of the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equipoise.balancer.requests.catalogue import FORMATS, WORKLOADS
from equipoise.cli import kinds
from equipoise.cli.options import Option

WHERE, WHAT, WHEN, OUTPUT = "server", "requests", "arrivals", "output"
ENDPOINTS = kinds.ENDPOINTS

OPTIONS = (
    Option(key="url", kind=kinds.NAME, group=WHERE, metavar="URL",
           shown_default="none: has to be given", help="of the server, or of the proxy"),
    Option(key="model", kind=kinds.NAME, group=WHERE, metavar="NAME",
           shown_default="the first that the server has", help="model to ask for"),
    Option(key="endpoint", kind=kinds.ENDPOINT, group=WHERE, metavar="|".join(ENDPOINTS),
           shown_default=ENDPOINTS[0], help="which of the API's two ways to ask"),
    Option(key="api_key_file", kind=kinds.PATH, group=WHERE, metavar="FILE", shown_default="none",
           help="key to send"),
    Option(key="timeout", kind=kinds.SECONDS, group=WHERE, metavar="SECONDS", shown_default="600",
           help="longest that a request may take"),
    Option(key="requests", kind=kinds.WHOLE, group=WHAT, metavar="N", shown_default="200",
           help="how many to send; at most as many as --trace has"),
    Option(key="workload", kind=kinds.WORKLOAD, group=WHAT, metavar="|".join(WORKLOADS),
           shown_default="sharegpt", help="lengths of prompts and outputs: "
           + "; ".join(f"{name}: {about}" for name, about in WORKLOADS.items())),
    Option(key="trace", kind=kinds.PATH, group=WHAT, metavar="FILE", shown_default="none",
           help=f"take lengths, and times where it has some, from a trace ({', '.join(FORMATS)})"),
    Option(key="prompt_tokens", kind=kinds.WHOLE, group=WHAT, metavar="N",
           shown_default="as --workload draws", help="make all prompts so long"),
    Option(key="output_tokens", kind=kinds.WHOLE, group=WHAT, metavar="N",
           shown_default="as --workload draws", help="ask for so many tokens each time"),
    Option(key="stop_early", kind=kinds.SWITCH, group=WHAT, shown_default="off",
           help="let answers end where the model ends them; else servers are sent ignore_eos"),
    Option(key="seed", kind=kinds.WHOLE, group=WHAT, metavar="N", shown_default="0",
           help="what lengths, words and arrivals are drawn from"),
    Option(key="rate", kind=kinds.REAL, group=WHEN, metavar="R", shown_default="none",
           help="requests per second: arrivals are Poisson, or the trace's own times, scaled"),
    Option(key="concurrency", kind=kinds.WHOLE, group=WHEN, metavar="N",
           shown_default="8, where there is no --rate and no trace with times",
           help="requests under way at any time: a closed loop"),
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write the figures there"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no progress, only the table"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What one `equipoise bench serve` was asked for; `progress` is `shown` or `hidden`."""

    url: str = ""
    model: str | None = None
    endpoint: str = ENDPOINTS[0]
    api_key_file: Path | None = None
    timeout: float = 600.0
    requests: int = 200
    workload: str = "sharegpt"
    trace: Path | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    stop_early: bool = False
    seed: int = 0
    rate: float | None = None
    concurrency: int | None = None
    json: Path | None = None
    progress: str = "shown"
