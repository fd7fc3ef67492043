"""How evenly a placement spreads recorded load: `equipoise report` and `equipoise plan`."""
