"""What `equipoise simulate` shows: a table, figures, a report."""
