"""Dictionaries between stages, as engines hand them over."""

import time
from functools import partial
from typing import Any

import torch
from helpers.rank_programs.call_outcome import outcome
from helpers.rank_programs.channels import counting_calls, place
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.hal.communicator import Fabric
from equipoise.pipeline.intermediate_tensors import AsyncIntermediateTensors
from equipoise.pipeline.tensor_dict import TensorDictGroup, open_tensor_dict_group

WIDTH = 1 << 14
"""Elements of a tensor whose reading takes a while."""
Fields = list[tuple[str, list[int], str]]
"""Name, shape and dtype of each tensor."""


def dictionary(number: int, fields: Fields, constants: dict[str, Any]) -> dict[str, Any]:
    """What is handed over in a step; tensors are strided where they have two dimensions."""
    tensors: dict[str, Any] = {}
    for place_of, (name, shape, dtype) in enumerate(fields):
        count = int(torch.tensor(shape).prod()) if shape else 1
        values = (torch.arange(count) * 3 + 7 * number + place_of) % 120
        tensor = values.view(shape).to(getattr(torch, dtype))
        tensors[name] = tensor.t().contiguous().t() if len(shape) == 2 else tensor
    return {**tensors, **constants}


def hand_around(
    fabric: Fabric, steps: list[tuple[Fields, dict[str, Any]]], lag: int, inference: bool
) -> Any:
    """Every rank hands each step to the next, the last to the first; reads are `lag` steps late."""
    with place(fabric) as at, torch.inference_mode(inference):
        group = open_tensor_dict_group("stages", list(range(fabric.control.size)), at)
        wrong: list[int] = []
        pending: list[tuple[int, AsyncIntermediateTensors]] = []
        for number, (fields, constants) in enumerate(steps):
            tensors = dictionary(number, fields, constants)
            handles = group.isend_tensor_dict(tensors)
            at.stream.launch(partial(_scribble, tensors, inference))
            pending.append((number, _receive(group)))
            if number % 2:
                for handle in handles[1:]:  # as engines do that keep the first apart
                    handle.wait()
            if len(pending) > lag:
                _check(*pending.pop(0), steps, wrong)
        for number, mapping in pending:
            _check(number, mapping, steps, wrong)
        group.drain()
        return wrong


def _receive(group: TensorDictGroup) -> AsyncIntermediateTensors:
    values, handles, postprocess = group.irecv_tensor_dict()
    return AsyncIntermediateTensors(values, comm_handles=handles, comm_postprocess=postprocess)


def _scribble(tensors: dict[str, Any], inference: bool) -> None:
    with torch.inference_mode(inference):
        for value in tensors.values():
            if isinstance(value, Tensor):
                value.fill_(1)


def _check(
    number: int,
    mapping: AsyncIntermediateTensors,
    steps: list[tuple[Fields, dict[str, Any]]],
    wrong: list[int],
) -> None:
    expected = dictionary(number, *steps[number])
    received: dict[str, Any] = dict(mapping.items())
    equal = received.keys() == expected.keys() and all(
        _same(received[name], expected[name]) for name in expected
    )
    if not equal:
        wrong.append(number)


def _same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return actual.dtype == expected.dtype and torch.equal(actual, expected)
    return bool(actual == expected and type(actual) is type(expected))


def steady(fabric: Fabric, steps: int) -> Any:
    """What a step costs when the steps are alike: on rank 0, which sends, and on rank 1."""
    with place(fabric) as at, counting_calls(at) as counts:
        group = open_tensor_dict_group("stages", [0, 1], at)
        for number in range(4 + steps):
            if number == 4:
                group.drain()
                counts.clear()
            if fabric.control.rank == 0:
                group.isend_tensor_dict({"hidden": torch.full((64, 64), float(number))})
            else:
                mapping = _receive(group)
                assert float(mapping["hidden"][0, 0]) == number
                mapping.release()
        group.drain()
        return dict(counts)


def let_go(fabric: Fabric, backend: str, steps: int) -> Any:
    """A reader launches what reads, and lets go of the tensors at once: nobody waits for it."""
    with place(fabric, backend=backend) as at:
        group, device = open_tensor_dict_group("stages", [0, 1], at), at.accelerator.device
        copies = torch.zeros(steps, WIDTH, dtype=torch.int64).to(device)
        at.accelerator.synchronize(WATCHDOG)
        for number in range(steps):
            if fabric.control.rank == 0:
                with at.stream.current():
                    hidden = torch.arange(WIDTH, device=device) + number
                group.isend_tensor_dict({"hidden": hidden})
                at.stream.launch(partial(_scribble, {"hidden": hidden}, False))
            else:
                mapping = _receive(group)
                at.stream.launch(partial(copies[number].copy_, mapping["hidden"]))
                mapping.release()
        group.drain()
        at.accelerator.synchronize(WATCHDOG)
        return [
            row[0].item()
            for row in copies.cpu()
            if bool((row == row[0] + torch.arange(WIDTH)).all())
        ]


def sliced(fabric: Fabric, chosen: dict[str, bool] | None) -> Any:
    """Two ranks on either side: what is the same on both goes in slices."""
    rank = fabric.control.rank
    with place(fabric, parts=2) as at:
        stages = [rank % 2, rank % 2 + 2]
        group = open_tensor_dict_group(f"stages {rank % 2}", stages, at)
        if rank < 2:
            return _send_sliced(group, rank, chosen)
        received = []
        for _ in range(3):
            values, handles, postprocess = group.irecv_tensor_dict(all_gather_group=object())
            mapping = AsyncIntermediateTensors(values, handles, postprocess)
            received.append({name: tensor.tolist() for name, tensor in mapping.items()})
            mapping.release()
        return received


def _send_sliced(
    group: TensorDictGroup, rank: int, all_gather_tensors: dict[str, bool] | None
) -> Any:
    last_outcome = {}
    for number in range(3):
        alike = torch.arange(6.0).view(3, 2) + number
        odd = torch.arange(3.0) + number
        own = torch.tensor([rank, number])
        tensors = {"alike": alike, "odd": odd, **({"own": own} if all_gather_tensors else {})}
        last_outcome = outcome(
            lambda given=tensors: group.isend_tensor_dict(  # type: ignore[misc]
                given, all_gather_group=object(), all_gather_tensors=all_gather_tensors
            )
        )
    group.drain()
    return last_outcome


def refused(fabric: Fabric) -> list[str]:
    """What is not the same is declared to be, twice."""
    rank = fabric.control.rank
    with place(fabric, parts=2) as at:
        group = open_tensor_dict_group(f"stages {rank % 2}", [rank % 2, rank % 2 + 2], at)
        if rank > 1:
            return []
        own = {"own": torch.tensor([rank, 0])}
        calls = [partial(group.isend_tensor_dict, own, all_gather_group=object())] * 2
        return [outcome(call)["error"] for call in calls]


def nobody_there(fabric: Fabric) -> Any:
    """Edges that there are not."""
    with place(fabric) as at:
        group = open_tensor_dict_group("stages", [0, 1, 2], at)
        other = (group.rank_in_group + 2) % 3
        return [
            outcome(lambda: group.isend_tensor_dict({}, dst=other))["text"],
            outcome(lambda: group.irecv_tensor_dict(src=(other + 2) % 3))["text"],
            group.is_first_rank,
            group.is_last_rank,
        ]


def idle(fabric: Fabric, seconds: float) -> Any:
    """Nobody asks for anything, for longer than any operation may take."""
    with place(fabric) as at:
        group = open_tensor_dict_group("stages", [0, 1], at)
        received = []
        for number in range(3):
            if fabric.control.rank == 0:
                group.isend_tensor_dict({"n": torch.tensor([number])})
            else:
                received.append(int(_receive(group)["n"]))
            group.drain()
            time.sleep(seconds)
        return received


def unread(fabric: Fabric, steps: int) -> Any:
    """Rank 1 lets go of every other step without a look at it."""
    with place(fabric) as at:
        group = open_tensor_dict_group("stages", [0, 1], at)
        received = []
        for number in range(steps):
            if fabric.control.rank == 0:
                group.isend_tensor_dict({"n": torch.tensor([number])})
                continue
            mapping = _receive(group)
            if number % 2:
                received.append(int(mapping["n"]))
        group.drain()
        at.stream.synchronize(WATCHDOG)
        return received
