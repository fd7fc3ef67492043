"""What the GPU's accelerator reads from elsewhere."""

from pathlib import Path
from types import SimpleNamespace

from equipoise.backends.cuda.accelerator import numa_node

PROPERTIES = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)


def test_numa_node_is_read_from_pci_slot(tmp_path: Path) -> None:
    slot = tmp_path / "0000:1b:00.0"
    slot.mkdir()
    (slot / "numa_node").write_text("1\n")
    assert numa_node(PROPERTIES, tmp_path) == 1


def test_numa_node_is_unknown_without_pci_information(tmp_path: Path) -> None:
    assert numa_node(PROPERTIES, tmp_path) == -1  # no such slot
    assert numa_node(SimpleNamespace(), tmp_path) == -1  # an older torch
    slot = tmp_path / "0000:1b:00.0"
    slot.mkdir()
    for text in ("-1\n", "-2\n", "none\n"):
        (slot / "numa_node").write_text(text)
        assert numa_node(PROPERTIES, tmp_path) == -1
