"""The balancers of engines, as far as replay has to know them: plans, dispatch, cadence."""
