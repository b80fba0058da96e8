"""Baselines that train in lockstep under the faults of a storm: data-parallel, elastic data-parallel, DiLoCo."""
