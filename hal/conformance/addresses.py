"""Family *addresses*: slots stay where they are, hold what they should, and nothing beside them."""

from equipoise.hal.conformance import arguments, attached, contents, large_slots, leasing, pages
from equipoise.hal.conformance.property import Property

PROPERTIES: tuple[Property, ...] = (
    *contents.PROPERTIES,
    *arguments.PROPERTIES,
    *leasing.PROPERTIES,
    *attached.PROPERTIES,
    *pages.PROPERTIES,
    *large_slots.PROPERTIES,
)
