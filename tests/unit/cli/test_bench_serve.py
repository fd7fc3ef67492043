"""`equipoise bench serve`: what it is told, and a whole run of it."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fakes.fake_openai_server import Fake, start

from equipoise.cli.bench import make_load_plan
from equipoise.serve.load_client import ClosedLoop, OpenLoop

TIMEOUT_S = 200.0
URL = ("--url", "http://127.0.0.1:1")
BAD: dict[tuple[str, ...], str] = {
    (): "--url is needed",
    ("--url", "a:1"): "--url has to be http://HOST:PORT",
    (*URL, "--requests", "0"): "--requests must be 1 to 100000000, got 0",
    (*URL, "--rate", "0"): "--rate must be above 0",
    (*URL, "--rate", "1", "--concurrency", "1"): "--rate and --concurrency: give one",
    (*URL, "--concurrency", "0"): "--concurrency must be 1 to 65536, got 0",
    (*URL, "--workload", "none"): "expected prop or az24 or reason or sharegpt, got 'none'",
    (*URL, "--endpoint", "none"): "expected chat or completions, got 'none'",
    (*URL, "--prompt-tokens", "0"): "--prompt-tokens must be 1 to 1048576, got 0",
    (*URL, "--timeout", "0"): "--timeout must be above 0",
    (*URL, "--seed", "-1"): "--seed must be at least 0",
    (*URL, "--trace", "none.csv"): "--trace: none.csv",
    (*URL, "--api-key-file", "none"): "--api-key-file: none cannot be read",
    (*URL, "--json", "."): "--json: . is a folder, not a file",
}


@pytest.mark.parametrize(("line", "message"), BAD.items())
def test_bench_serve_rejects_bad_input(
    equipoise: Callable[..., Any], line: tuple[str, ...], message: str
) -> None:
    answer = equipoise("bench", "serve", *line)
    assert answer.code == 2, answer.err
    assert message in answer.err.splitlines()[-1]


def plan_for(*line: str) -> Any:
    from equipoise.cli.parser import read_request

    return make_load_plan(read_request(["bench", "serve", *URL, *line])[1])


def test_bench_serve_plan_follows_rate_concurrency_and_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": n * 1000, "input_length": 5 + n, "output_length": 7, "hash_ids": [n]}
            for n in range(5)]  # fmt: skip
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plan_for().pacing == ClosedLoop(8)
    assert plan_for("--concurrency", "3").pacing == ClosedLoop(3)
    poisson = plan_for("--rate", "2", "--requests", "2000")
    assert poisson.pacing == OpenLoop()
    assert abs(poisson.workload.arrivals[-1] - 1000) < 150
    trace_plan = plan_for("--trace", str(trace))
    assert [one.send_at for one in trace_plan] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert list(trace_plan.workload.prompts) == [5, 6, 7, 8, 9]
    faster = plan_for("--trace", str(trace), "--rate", "4", "--requests", "3")
    assert [one.send_at for one in faster] == [0.0, 0.25, 0.5]
    assert plan_for("--trace", str(trace), "--concurrency", "2").pacing == ClosedLoop(2)


def test_bench_serve_lengths_are_fixed_or_drawn_by_seed() -> None:
    fixed_plan = plan_for("--prompt-tokens", "11", "--output-tokens", "3", "--requests", "4")
    assert [(len(one.prompt.split()), one.output) for one in fixed_plan] == [(11, 3)] * 4
    length_plans = [list(plan_for("--seed", seed)) for seed in ("1", "1", "2")]
    assert length_plans[0] == length_plans[1]
    assert length_plans[0] != length_plans[2]


@pytest.fixture
def fake() -> Iterator[Fake]:
    """A server on a thread of its own, since the program has an event loop of its own."""
    worker, worker_ready, loop = Fake("w0"), threading.Event(), asyncio.new_event_loop()

    def serve() -> None:
        runner = loop.run_until_complete(start(worker))
        worker_ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert worker_ready.wait(TIMEOUT_S)
    yield worker
    loop.call_soon_threadsafe(loop.stop)
    thread.join(TIMEOUT_S)


def test_bench_serve_prints_table_and_writes_figures(
    equipoise: Callable[..., Any], fake: Fake, tmp_path: Path
) -> None:
    url = ("--url", f"http://127.0.0.1:{fake.port}")
    line = ("--requests", "5", "--output-tokens", "4", "--json", "figures.json", "--quiet")
    answer = equipoise("bench", "serve", *url, *line)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("5 of 5 requests answered\n")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["answered"], figures["output_tokens"]) == (5, 20)
    assert figures["command"].startswith("equipoise bench serve --url http://127.0.0.1:")
    assert set(figures["ttft"]) == {"mean", "p50", "p90", "p99", "most"}
    assert len(fake.events("end")) == 5


def test_bench_serve_takes_url_with_v1(equipoise: Callable[..., Any], fake: Fake) -> None:
    url = ("--url", f"http://127.0.0.1:{fake.port}/v1/")
    answer = equipoise("bench", "serve", *url, "--requests", "2", "--quiet")
    assert (answer.code, answer.err) == (0, "")


def test_bench_serve_without_server_says_one_line(equipoise: Callable[..., Any]) -> None:
    answer = equipoise("bench", "serve", *URL)
    assert (answer.code, answer.out) == (3, "")
    assert answer.err == (
        "equipoise: error: http://127.0.0.1:1/v1/models does not answer: Connection refused\n"
    )


def test_bench_serve_exit_code_reports_failures(equipoise: Callable[..., Any], fake: Fake) -> None:
    url = ("--url", f"http://127.0.0.1:{fake.port}/nowhere")
    answer = equipoise("bench", "serve", *url, "--model", "m", "--requests", "3", "--quiet")
    assert answer.code == 1
    assert "failed: 3 x status 405" in answer.out
    nameless = equipoise("bench", "serve", *url, "--quiet")
    assert nameless.code == 3
    assert "names no model: give --model" in nameless.err
