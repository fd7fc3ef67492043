"""The messages of the shape classes that an end has met."""

from collections import OrderedDict
from dataclasses import dataclass

from equipoise.pipeline.layout import Layout, layout_of
from equipoise.pipeline.shape_class import ShapeClass
from equipoise.pipeline.statistics import EdgeMeter

MOST = 1024
"""Classes that are remembered: those that were used last. Both ends see the same messages in the
same order, so both forget the same ones."""


@dataclass(frozen=True)
class Met:
    """A class's message, and whether none of it has gone before, that one could remember."""

    layout: Layout
    first: bool


class Layouts:
    """Layouts by class; classes are told apart by their digests, since 1 and True are not one
    constant, though they are equal.

    Args:
        parts: slices that a sliced tensor is cut into.
        meter: counts the classes.
    """

    def __init__(self, parts: int, meter: EdgeMeter) -> None:
        self._parts = parts
        self._meter = meter
        self._layouts: OrderedDict[int, Layout] = OrderedDict()

    def of(self, shape_class: ShapeClass) -> Met:
        """The message of a class; nothing is remembered until it is met."""
        known = self._layouts.get(shape_class.digest)
        if known is not None:
            return Met(known, first=False)
        return Met(layout_of(shape_class, self._parts), first=True)

    def known(self, digest: int) -> Layout | None:
        """The message of a class that was met."""
        return self._layouts.get(digest)

    def meet(self, met: Met) -> None:
        """A message of the class goes, or has come."""
        digest = met.layout.shape_class.digest
        if met.first:
            self._layouts[digest] = met.layout
            self._meter.class_met()
        self._layouts.move_to_end(digest)
        if len(self._layouts) > MOST:
            self._layouts.popitem(last=False)
