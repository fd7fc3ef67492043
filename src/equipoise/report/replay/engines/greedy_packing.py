"""The greedy step that engines' planners share: each item to the lightest pack that has room."""

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]


def pack_in_order(sizes: npt.NDArray[np.float64], packs: int) -> tuple[Places, Places]:
    """Packs the items of each row, first to last, each into the lightest pack that has room.

    Ties go to the lower pack. Loads are added up in float64 in the order of the items, as DeepSeek
    (Python's floats) and TensorRT-LLM (double) do, so that ties by rounding are theirs too.

    Args:
        sizes: (rows, items).
        packs: how many; every one takes items // packs items.

    Returns:
        Pack and place within the pack of each item, both (rows, items).
    """
    rows, items = sizes.shape
    room, row = items // packs, np.arange(rows)
    loads = np.zeros((rows, packs))
    filled = np.zeros((rows, packs), dtype=np.int64)
    pack, place = np.empty((2, rows, items), dtype=np.int64)
    for item in range(items):
        lightest = loads.argmin(axis=1)
        pack[:, item] = lightest
        place[:, item] = filled[row, lightest]
        filled[row, lightest] += 1
        load = loads[row, lightest] + sizes[:, item]
        loads[row, lightest] = np.where(filled[row, lightest] == room, np.inf, load)
    return pack, place
