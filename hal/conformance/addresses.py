"""Family *addresses*: slots stay where they are, hold what they should, and nothing beside them."""

from equipoise.hal.conformance import arguments, attached, contents, leasing, pages, slot_sizes
from equipoise.hal.conformance.property import Property

PROPERTIES: tuple[Property, ...] = (
    *contents.PROPERTIES,
    *arguments.PROPERTIES,
    *leasing.PROPERTIES,
    *attached.PROPERTIES,
    *pages.PROPERTIES,
    *slot_sizes.PROPERTIES,
)
