"""The same with the proxy in front, ranks of one server as its workers.

The configuration is that of the examples, with our ports and what our model has.
"""

import sys
from pathlib import Path

import yaml
from engines.vllm.runs.case import Answers, Case
from engines.vllm.runs.process_cleanup import end_with_parent
from engines.vllm.runs.run_server import ask_all, get, served_by, server
from helpers.paths import ROOT
from helpers.processes.ports import free_port

EXAMPLE = ROOT / "examples" / "configs" / "route-reports-vllm.yaml"
KV_TOKENS = 8192
"""Tokens, fewer than the cache of a rank holds: a report's part of it is told by this."""


def proxy_config(case: Case, server_port: int, port: int) -> str:
    """The example, for the ranks of a server here."""
    config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    config["workers"] = config["workers"][: case.engine["data_parallel_size"]]
    for worker in config["workers"]:
        worker["url"] = f"http://127.0.0.1:{server_port}"
    config |= {"port": port, "slots": case.engine["max_num_seqs"], "kv_tokens": KV_TOKENS}
    return str(yaml.safe_dump(config))


def main() -> int:
    """The program."""
    end_with_parent()
    case = Case.parsed(Path(sys.argv[1]).read_text(encoding="utf-8"))
    port, file = free_port(), Path("route.yaml")
    with server(case) as behind:
        file.write_text(proxy_config(case, behind, port), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "equipoise", "route", "--config", str(file)]
        with served_by(command, port):
            rounds = ask_all(port, case)
            pages = get(behind, "/metrics")[1], get(port, "/metrics")[1]
    Answers(rounds, metrics=pages[0], proxy=pages[1]).write(Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
