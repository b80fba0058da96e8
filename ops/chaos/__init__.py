"""`archipelago chaos`: faults on real processes, baselines under the same faults, and their report."""
