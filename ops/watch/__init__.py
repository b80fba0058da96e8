"""Inspect and steer a run from a terminal: `status`, `steer`, `doctor`, `report`."""
