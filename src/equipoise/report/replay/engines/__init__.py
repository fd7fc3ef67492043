"""The balancers of engines, as far as replay has to know them: plans, dispatch, cadence."""

from collections.abc import Mapping

from equipoise.report.replay.engine_model import EngineModel

ENGINES: Mapping[str, EngineModel] = {}
"""By name."""
