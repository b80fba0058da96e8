"""`archipelago dash`: show a run in the browser."""
