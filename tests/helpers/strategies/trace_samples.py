"""Small routing traces: ids of requests, and the files that engines write of them."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int32]


def random_ids(seed: int, tokens: int, layers: int, top_k: int, experts: int) -> Ids:
    """(tokens, layers, top_k), distinct within a token; the largest id is there."""
    keys = np.random.default_rng(seed).random((tokens, layers, experts))
    ids = np.argsort(keys, axis=2)[:, :, :top_k].astype(np.int32)
    ids[0, 0] = np.arange(experts - top_k, experts)
    return ids


@st.composite
def requests(draw: st.DrawFn, fewest_layers: int = 1) -> list[Ids]:
    """The ids of one to four requests of one model; every layer has experts."""
    layers, experts = draw(st.integers(fewest_layers, 4)), draw(st.integers(3, 9))
    top_k, seed = draw(st.integers(2, experts - 1)), draw(st.integers(0, 1000))
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    return [
        random_ids(seed + at, tokens, layers, top_k, experts) for at, tokens in enumerate(lengths)
    ]


def write_arrays(folder: Path, parts: Sequence[npt.NDArray[Any]]) -> Path:
    """A folder of arrays, as a user of vLLM saves them."""
    folder.mkdir()
    for at, ids in enumerate(parts):
        np.save(folder / f"{at}.npy", ids.astype(np.uint8))
    return folder


def vllm_response(ids: npt.NDArray[Any], prompt_tokens: int) -> dict[str, Any]:
    """A response of vLLM's server."""
    stream = io.BytesIO()
    np.save(stream, ids.astype(np.uint8))
    return {
        "id": "cmpl-1",
        "choices": [{"routed_experts": base64.b64encode(stream.getvalue()).decode()}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(ids) + 1 - prompt_tokens,
        },
    }


def sglang_response(ids: npt.NDArray[Any], prompt_tokens: int) -> dict[str, Any]:
    """A response of SGLang's `/generate`."""
    return {
        "text": "",
        "meta_info": {
            "id": "a",
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(ids) + 1 - prompt_tokens,
            "routed_experts": base64.b64encode(ids.astype("<i4").tobytes()).decode(),
        },
    }


def write_lines(path: Path, responses: Sequence[dict[str, Any]]) -> Path:
    """A response in each line."""
    path.write_text("".join(json.dumps(one) + "\n" for one in responses), encoding="utf-8")
    return path


def write_csv(path: Path, parts: Sequence[Ids]) -> Path:
    """Requests as CSV, layer by layer as llama.cpp runs them."""
    lines = ["request,phase,token,layer,rank,expert"]
    for at, ids in enumerate(parts):
        for layer, token, place in np.ndindex(ids.shape[1], ids.shape[0], ids.shape[2]):
            lines.append(f"{at},decode,{token},{layer},{place},{ids[token, layer, place]}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_records(path: Path, parts: Sequence[Ids], tokens: bool) -> Path:
    """A dump of SGLang's recorder: one forward pass for each part, two slots for each expert."""
    experts = max(int(ids.max()) for ids in parts) + 1
    layers, top_k = parts[0].shape[1:]
    slot_map = torch.arange(2 * experts).repeat(layers, 1) % experts
    records = []
    for step, ids in enumerate(parts):
        # Every second token goes to the second copy.
        slots = torch.from_numpy(ids + experts * (np.arange(len(ids)) % 2)[:, None, None])
        slots = slots.permute(1, 0, 2)
        chosen = torch.full((layers, len(ids), max(top_k, 8)), -1, dtype=torch.int32)
        chosen[:, :, :top_k] = slots
        rows = [torch.bincount(row.flatten().long(), minlength=2 * experts) for row in slots]
        counts = torch.stack(rows).int()
        record = {"forward_pass_id": step, "rank": 0, "gatherer_key": "primary"}
        of_tokens = {"forward_mode": 2, "topk_ids_of_layer": chosen} if tokens else {}
        records.append({**record, **of_tokens, "global_physical_count": counts})
    torch.save({"records": records, "last_physical_to_logical_map": slot_map}, path)
    return path
