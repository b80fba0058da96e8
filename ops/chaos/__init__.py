"""`archipelago chaos`: real processes, and baselines, under a schedule of faults."""
