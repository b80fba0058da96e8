"""Look at a run and steer it from a terminal: `status`, `steer`, `doctor`, `report`, `evaluate`."""
