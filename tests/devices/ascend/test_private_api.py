"""The installed torch_npu has every name that the backend takes of it and no page describes."""

from equipoise.backends.ascend import private_api


def test_torch_npu_has_every_private_name() -> None:
    assert private_api.missing() == ()
