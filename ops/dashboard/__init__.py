"""`archipelago dash`: a run in the browser."""
