"""The messages of the shape classes that an end has met."""

from dataclasses import dataclass

from equipoise.pipeline.layout import Layout, layout_of
from equipoise.pipeline.shape_class import ShapeClass
from equipoise.pipeline.statistics import EdgeMeter


@dataclass(frozen=True)
class Met:
    """A class's message, and whether this is the first time that it is asked for."""

    layout: Layout
    first: bool


class Layouts:
    """Layouts by class, made once each.

    Args:
        parts: slices that a sliced tensor is cut into.
        meter: counts the classes.
    """

    def __init__(self, parts: int, meter: EdgeMeter) -> None:
        self._parts = parts
        self._meter = meter
        self._layouts: dict[ShapeClass, Layout] = {}

    def of(self, shape_class: ShapeClass) -> Met:
        """The message of a class."""
        known = self._layouts.get(shape_class)
        if known is not None:
            return Met(known, first=False)
        made = self._layouts[shape_class] = layout_of(shape_class, self._parts)
        self._meter.class_met()
        return Met(made, first=True)

    def forget(self, shape_class: ShapeClass) -> None:
        """Nothing of that class was sent: the next time is the first again."""
        self._layouts.pop(shape_class, None)
