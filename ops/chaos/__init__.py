"""`archipelago chaos`: run real processes under a schedule of faults, run baselines under the same faults, and report."""
