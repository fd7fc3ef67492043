"""Family *kernels*."""

from equipoise.hal.conformance.property import Property

PROPERTIES: tuple[Property, ...] = ()
