"""One case through `vllm.LLM`: `python -m engines.vllm.runs.run_offline CASE ANSWERS`."""

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from engines.vllm.runs.case import ROUTED_FOLDER, Answers, Case
from engines.vllm.runs.process_cleanup import end_with_parent
from vllm import LLM, RequestOutput, SamplingParams


def generate(case: Case) -> Answers:
    """All rounds, then the questions."""
    if case.holes:
        prepare_to_fork()
    engine = LLM(**case.arguments)
    sampling = SamplingParams(temperature=0.0, max_tokens=case.tokens, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in case.prompts]
    rounds = []
    for _ in range(case.rounds):
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        rounds.append([list(output.outputs[0].token_ids) for output in outputs])
        write_routed_experts(outputs, Path(ROUTED_FOLDER))
    rpc_results = {name: engine.collective_rpc(name) for name in case.asks}
    return Answers(rounds, rpc_results)


def write_routed_experts(outputs: Sequence[RequestOutput], folder: Path) -> None:
    """Save the experts of each request, where the engine returns them, as a user would."""
    for number, output in enumerate(outputs):
        ids = output.outputs[0].routed_experts
        if ids is not None:
            folder.mkdir(exist_ok=True)
            np.save(folder / f"{number}.npy", ids)


def prepare_to_fork() -> None:
    """Import what workers import; and keep collections in workers off the pages that they share."""
    import_module("vllm_cpu.worker")
    gc.collect()
    gc.freeze()


def main() -> int:
    """The program."""
    end_with_parent()
    case, answers = Path(sys.argv[1]), Path(sys.argv[2])
    generate(Case.parsed(case.read_text(encoding="utf-8"))).write(answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
