"""Family *resources*: what is declared, what is handed out, and what is given back."""

from equipoise.hal.conformance import closed_devices, cycles, devices, signatures
from equipoise.hal.conformance.property import Property

PROPERTIES: tuple[Property, ...] = (
    *devices.PROPERTIES,
    *closed_devices.PROPERTIES,
    *signatures.PROPERTIES,
    *cycles.PROPERTIES,
)
