"""From the record of a storm to figures, checks of the invariants, plots and an HTML page."""
