"""One case through `vllm serve` and streaming clients, as a program: `served IN OUT`."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from engines.vllm.runs.case import RESPONSES_FILE, Answers, Case
from engines.vllm.runs.process_cleanup import end_with_parent
from helpers.processes.ports import free_port

READY = 900.0
"""Seconds within which the server answers: five processes import an engine first."""
TIMEOUT_S = 120.0
"""Seconds between two pieces of an answer, and for the server to end."""
STAY = 0.3
"""Seconds for which a client stays that wants no answer."""
RANK = "X-data-parallel-rank"


def flags(arguments: dict[str, Any]) -> list[str]:
    """Arguments of the engine as the command takes them, the model first."""
    words = [arguments["model"]]
    for name, value in arguments.items():
        option = name.replace("_", "-")
        match value:
            case bool():
                words.append(f"--{option}" if value else f"--no-{option}")
            case dict():
                words += [f"--{option}", json.dumps(value)]
            case _ if name != "model":
                words += [f"--{option}", str(value)]
    return words


def serve_and_ask(case: Case) -> Answers:
    """All rounds; the prompts of one are asked at the same time."""
    with server(case) as port:
        rounds = ask_all(port, case)
        if case.engine.get("enable_return_routed_experts"):
            lines = [ask_whole(port, case, number) for number in range(len(case.prompts))]
            Path(RESPONSES_FILE).write_text("".join(lines), encoding="utf-8")
        return Answers(rounds, metrics=get(port, "/metrics")[1])


def ask_all(port: int, case: Case) -> list[list[list[int]]]:
    """Tokens by round and prompt, of whoever listens at `port`."""
    rounds = []
    with ThreadPoolExecutor(len(case.prompts) + case.leavers) as clients:
        for _ in range(case.rounds):
            requests = [
                clients.submit(ask, port, case, number) for number in range(len(case.prompts))
            ]
            disconnects = [clients.submit(leave, port, case) for _ in range(case.leavers)]
            rounds.append([one.result() for one in requests])
            for one in disconnects:
                one.result()
    return rounds


def leave(port: int, case: Case) -> None:
    """Ask for more than would come while one waits, and go."""
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    body = {"model": case.model, "prompt": case.prompts[0], "stream": True, "max_tokens": 200}
    text = json.dumps(body | {"ignore_eos": True})
    connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
    time.sleep(STAY)
    connection.close()


def ask(port: int, case: Case, number: int) -> list[int]:
    """Tokens of one streamed answer. Raises `RuntimeError` where the server says an error."""
    sampling = {"temperature": 0.0, "max_tokens": case.tokens, "ignore_eos": True}
    body = {"model": case.model, "prompt": case.prompts[number], "stream": True, **sampling}
    headers = {"Content-Type": "application/json"}
    if case.pins and case.pins[number] is not None:
        headers[RANK] = str(case.pins[number])
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        text = json.dumps(body | {"return_token_ids": True})
        connection.request("POST", "/v1/completions", text, headers)
        return list(_tokens_of_stream(connection.getresponse()))
    finally:
        connection.close()


def ask_whole(port: int, case: Case, number: int) -> str:
    """One answer that is not streamed, as a line of JSON."""
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    body = {"model": case.model, "prompt": case.prompts[number], "max_tokens": case.tokens}
    try:
        text = json.dumps(body | {"temperature": 0.0, "ignore_eos": True})
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        return json.dumps(json.load(connection.getresponse())) + "\n"
    finally:
        connection.close()


def _tokens_of_stream(response: HTTPResponse) -> Iterator[int]:
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {response.read()!r}")
    for line in response:
        piece = line.decode().removeprefix("data: ").strip()
        if not piece or piece == "[DONE]":
            continue
        event = json.loads(piece)
        if "error" in event:
            raise RuntimeError(piece)
        for choice in event["choices"]:
            yield from choice["token_ids"] or []


@contextmanager
def server(case: Case) -> Iterator[int]:
    """The port of a server that answers; it is told to end, and is killed if it does not."""
    port = free_port()
    # What the command `vllm` runs, by the interpreter that runs this.
    vllm = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main"]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    with served_by([*vllm, "serve", *flags(case.arguments), *address], port):
        yield port


@contextmanager
def served_by(command: list[str], port: int) -> Iterator[None]:
    """While `command` answers at `port`; then it is told to end."""
    process = subprocess.Popen(command)
    try:
        _await(process, port)
        yield
    finally:
        process.terminate()
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(server: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + READY
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            if get(port, "/health")[0] == 200:
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"the server does not answer within {READY:.0f} s")


def get(port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def main() -> int:
    """The program."""
    end_with_parent()
    case, answers = Path(sys.argv[1]), Path(sys.argv[2])
    serve_and_ask(Case.parsed(case.read_text(encoding="utf-8"))).write(answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
