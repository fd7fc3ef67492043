"""Bad input of `equipoise simulate`: one line, exit code 2, nothing simulated, nothing written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SYNTHETIC = ("--workload", "sharegpt")
TRACED = ("--trace", "t.csv")
HASHED = ("--trace", "t.jsonl", "--prefill-chunk", "64", "--cached-blocks", "4")

BAD = {
    "waiting for prompts that are free": (
        (*SYNTHETIC, "--policies", "fit", "--prefill-wait", "2"),
        "--prefill-wait needs --prompt-weight",
    ),
    "a window without fit": (
        (*SYNTHETIC, "--policies", "random,jsq", "--window", "5"),
        "--window has no effect without fit among --policies",
    ),
    "a slack without fit": (
        (*SYNTHETIC, "--policies", "jsq", "--slack", "1"),
        "--slack has no effect",
    ),
    "an out that is a file": ((*SYNTHETIC, "--out", "t.csv"), "--out: t.csv is not a folder"),
    "nothing to serve": ((), "--trace or --workload, one of them: neither is given"),
    "two things to serve": ((*SYNTHETIC, *TRACED), "--trace or --workload, one of them: both are"),
    "an unknown workload": (("--workload", "chat"), "expected prop or az24 or reason or sharegpt"),
    "an unknown policy": (
        (*SYNTHETIC, "--policies", "fit,best"),
        "--policies: unknown name 'best'; known: all, random, round_robin",
    ),
    "all and another": ((*SYNTHETIC, "--policies", "all,fit"), "--policies: unknown name 'all'"),
    "a policy twice": ((*SYNTHETIC, "--policies", "fit,fit"), "--policies: fit is there twice"),
    "no policy": ((*SYNTHETIC, "--policies", ""), "expected names with commas between, got ''"),
    "an unknown format": ((*TRACED, "--format", "xml"), "expected azure or mooncake or burstgpt"),
    "a format of nothing": ((*SYNTHETIC, "--format", "azure"), "--format needs --trace"),
    "a trace that is missing": (("--trace", "no.csv"), "no.csv: cannot be read"),
    "a trace that is a folder": (("--trace", "."), "is a folder, not a file"),
    "a trace that is none": (("--trace", "words.txt"), "words.txt: line 1: begins with"),
    "a trace of another format": ((*TRACED, "--format", "mooncake"), "t.csv: line 1: "),
    "a trace without such prompts": (
        (*TRACED, "--prompt-limit", "1"),
        "has no request with a prompt of at most 1 tokens",
    ),
    "samples of a workload": ((*SYNTHETIC, "--sampling", "shuffled"), "--sampling needs --trace"),
    "no worker": ((*SYNTHETIC, "--workers", "0"), "--workers must be 1 to 4096, got 0"),
    "a negative number of workers": (
        (*SYNTHETIC, "--workers", "-4"),
        "--workers must be 1 to 4096, got -4",
    ),
    "too many workers": (
        (*SYNTHETIC, "--workers", "5000"),
        "--workers must be 1 to 4096, got 5000",
    ),
    "no slot": (
        (*SYNTHETIC, "--slots-per-worker", "0"),
        "--slots-per-worker must be 1 to 65536, got 0",
    ),
    "slots of other workers": (
        (*SYNTHETIC, "--slots-per-worker", "8,8", "--workers", "3"),
        "--slots-per-worker has 2 numbers, and there are 3 --workers",
    ),
    "slots of each in a sweep of workers": (
        (*SYNTHETIC, "--slots-per-worker", "8,8", "--workers", "2", "--sweep", "workers"),
        "--sweep workers needs one number of --slots-per-worker",
    ),
    "an alignment of no engine": (
        (*SYNTHETIC, "--prefill-chunk", "9", "--prefill-alignment", "trt"),
        "expected sglang, vllm, trtllm, and a limit in steps behind a colon, got 'trt'",
    ),
    "an alignment of no engine, with a limit": (
        (*SYNTHETIC, "--prefill-chunk", "9", "--prefill-alignment", "VLLM:8"),
        "expected sglang, vllm, trtllm, and a limit in steps behind a colon, got 'VLLM:8'",
    ),
    "an alignment without its limit": (
        (*SYNTHETIC, "--prefill-chunk", "9", "--prefill-alignment", "vllm:"),
        "expected sglang, vllm, trtllm, and a limit in steps behind a colon, got 'vllm:'",
    ),
    "an alignment for no step": (
        (*SYNTHETIC, "--prefill-chunk", "9", "--prefill-alignment", "vllm:0"),
        "a limit is 1 to 1000000 steps, got 0",
    ),
    "an alignment of nothing": (
        (*SYNTHETIC, "--prefill-alignment", "vllm"),
        "--prefill-alignment needs --prefill-chunk",
    ),
    "no room": ((*SYNTHETIC, "--kv-tokens", "0"), "--kv-tokens must be 1 to 1099511627776, got 0"),
    "no request": ((*SYNTHETIC, "--requests", "0"), "--requests must be 1 to 10000000, got 0"),
    "no seed": ((*SYNTHETIC, "--seeds", "0"), "--seeds must be 1 to 1000, got 0"),
    "a negative seed": ((*SYNTHETIC, "--seed", "-1"), "--seed must be 0 to 4294967296, got -1"),
    "no load": ((*SYNTHETIC, "--load", "0"), "--load must be 1e-06 to 100, got 0"),
    "next to no load": (
        (*SYNTHETIC, "--load", "1e-300"),
        "--load must be 1e-06 to 100, got 1e-300",
    ),
    "a negative load": ((*SYNTHETIC, "--load", "-0.5"), "--load must be 1e-06 to 100"),
    "a load in words": (
        (*SYNTHETIC, "--load", "full"),
        "expected saturated or a number, got 'full'",
    ),
    "times of a workload": (
        (*SYNTHETIC, "--load", "0.5", "--arrivals", "trace"),
        "--arrivals trace needs --trace",
    ),
    "times of nothing": ((*SYNTHETIC, "--arrivals", "poisson"), "--arrivals poisson needs --load"),
    "times where requests wait": (
        (*SYNTHETIC, "--load", "saturated", "--arrivals", "poisson"),
        "--arrivals has no effect with --load saturated",
    ),
    "times that the trace lacks": (
        ("--trace", "chat.json", "--arrivals", "trace"),
        "has no times of arrival",
    ),
    "all of a step fixed": (
        (*SYNTHETIC, "--fixed-share", "1"),
        "--fixed-share must be below 1, got 1",
    ),
    "less than nothing fixed": (
        (*SYNTHETIC, "--fixed-share", "-0.1"),
        "--fixed-share must be 0 to 1, got -0.1",
    ),
    "a share of another model": (
        (*SYNTHETIC, "--fixed-share", "0.3", "--step-model", "blog"),
        "--fixed-share has no effect with --step-model blog",
    ),
    "a rate of another model": (
        (*SYNTHETIC, "--seconds-per-token", "1e-7", "--step-model", "bfio"),
        "--seconds-per-token has no effect with --step-model bfio",
    ),
    "an unknown model": (
        (*SYNTHETIC, "--step-model", "mine"),
        "expected share or bfio or blog or dy",
    ),
    "steps without time": ((*SYNTHETIC, "--seconds-per-token", "0"), "must be above 0"),
    "negative noise": ((*SYNTHETIC, "--noise", "-1"), "--noise must be 0 to 10, got -1"),
    "no queue timeout": ((*SYNTHETIC, "--queue-timeout", "0"), "--queue-timeout must be above 0"),
    "negative queue timeout": (
        (*SYNTHETIC, "--queue-timeout", "-1"),
        "--queue-timeout must be above 0, up to 1e+09, got -1",
    ),
    "reports from the future": (
        (*SYNTHETIC, "--report-interval", "-5"),
        "--report-interval must be 0 to",
    ),
    "no front end": ((*SYNTHETIC, "--front-ends", "0"), "--front-ends must be 1 to 1024, got 0"),
    "no window": ((*SYNTHETIC, "--window", "0"), "--window must be 1 to 65536, got 0"),
    "negative wait bonus": ((*SYNTHETIC, "--wait-bonus", "-1"), "--wait-bonus must be 0 to"),
    "negative slack": ((*SYNTHETIC, "--slack", "-1"), "--slack must be 0 to"),
    "negative prefill wait": ((*SYNTHETIC, "--prefill-wait", "-1"), "--prefill-wait must be 0 to"),
    "acceptance of nothing": (
        (*SYNTHETIC, "--acceptance", "0.5"),
        "--acceptance needs --draft-tokens",
    ),
    "a chance above one": (
        (*SYNTHETIC, "--draft-tokens", "2", "--acceptance", "1.5"),
        "--acceptance must be 0 to 1, got 1.5",
    ),
    "a weight of prompts that come": (
        (*SYNTHETIC, "--prompt-weight", "9"),
        "needs --prefill-chunk",
    ),
    "a cache of prompts that come": ((*SYNTHETIC, "--cached-blocks", "9"), "needs --prefill-chunk"),
    "a cache without hashes": (
        (*SYNTHETIC, "--prefill-chunk", "64", "--cached-blocks", "9"),
        "--cached-blocks needs a trace with hashes",
    ),
    "a trace without hashes": (
        (*TRACED, "--prefill-chunk", "64", "--cached-blocks", "9"),
        "--cached-blocks: t.csv has no hashes of prompts",
    ),
    "prompts drawn twice": ((*HASHED, "--sampling", "bootstrap"), "--sampling bootstrap: a prompt"),
    "points of nothing": ((*SYNTHETIC, "--points", "1,2"), "--points needs --sweep"),
    "half a worker": (
        (*SYNTHETIC, "--sweep", "workers", "--points", "2.5"),
        "--points: 2.5 is not what --sweep workers goes over",
    ),
    "a point twice": ((*SYNTHETIC, "--sweep", "load", "--points", "1,1.0"), "one is there twice"),
    "points in words": (
        (*SYNTHETIC, "--sweep", "load", "--points", "few"),
        "expected numbers with c",
    ),
    "an unknown sweep": ((*SYNTHETIC, "--sweep", "slots"), "expected load or workers, got 'slots'"),
    "figures over the trace": ((*TRACED, "--json", "t.csv"), "the file that --trace is read from"),
    "one file for two": (
        (*SYNTHETIC, "--json", "f", "--html", "./f"),
        "the file that --json is writ",
    ),
    "a folder as report": ((*SYNTHETIC, "--html", "."), "--html: . is a folder, not a file"),
    "a folder below a file": ((*SYNTHETIC, "--out", "t.csv/deep"), "t.csv is not a folder"),
    "an unknown key": (("--config", "typo.yaml"), "unknown key 'wokers'; did you mean workers?"),
    "a word for a number": (("--config", "word.yaml"), "key 'workers': expected a whole number"),
    "no name in a list": (("--config", "list.yaml"), "key 'policies': expected names with commas"),
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    Path("t.jsonl").write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    )
    talk = '{"from": "human", "value": "what is it"}, {"from": "gpt", "value": "it is a router"}'
    Path("chat.json").write_text(f'[{{"id": "a", "conversations": [{talk}]}}]')
    Path("words.txt").write_text("these are words\n")
    Path("typo.yaml").write_text("workload: prop\nwokers: 4\n")
    Path("word.yaml").write_text("workload: prop\nworkers: four\n")
    Path("list.yaml").write_text("workload: prop\npolicies: [fit, 3]\n")


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_simulate_rejects_bad_input_and_writes_nothing(
    equipoise: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    before = sorted(os.listdir(tmp_path))
    answer = equipoise("simulate", *arguments)
    assert (answer.code, answer.out) == (2, "")
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line
    assert sorted(os.listdir(tmp_path)) == before
