"""The report of `equipoise run`: formulas, table, plots, page, trace."""
