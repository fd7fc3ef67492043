"""Whether tensors that are sent in slices are the same on all ranks that send one.

A slice of each rank is only the whole where all ranks hold the same. Where they do not, what the
receivers gather is of nobody, and nothing crashes (SGLang issue 30015 is of that kind).
"""

import torch
from torch import Tensor

from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.errors import NotReplicated
from equipoise.pipeline.edge import Edge, Slices
from equipoise.pipeline.layout import Layout
from equipoise.pipeline.packing import Tensors
from equipoise.pipeline.shape_class import Constant


def check_replicated(edge: Edge, slices: Slices, layout: Layout, tensors: Tensors) -> None:
    """Compare checksums over the ranks of the slices; collective, and blocks the host.

    Raises:
        NotReplicated: names the tensors that differ; on all of these ranks.
        CommunicatorFailed: a rank did not come by the deadline.
    """
    names = [place.field.name for place in layout.sliced]
    found = [as_int64(checksum(_tensor(tensors[name]).contiguous())) for name in names]
    mine = torch.tensor(found, dtype=torch.int64, device=edge.accelerator.device)
    every = mine.new_empty(slices.parts, len(names))
    slices.comparing.all_gather(every, mine).result(edge.deadline)
    differing = (every != every[0]).any(0).tolist()
    if any(differing):
        which = ", ".join(name for name, differs in zip(names, differing, strict=True) if differs)
        raise NotReplicated(
            f"{edge.name}: {which} is declared the same on {slices.parts} ranks, and is not: "
            "send it whole"
        )


def _tensor(value: Tensor | Constant) -> Tensor:
    assert isinstance(value, Tensor)  # a field of the layout
    return value
