"""The command line, the launcher, and everything around a run: status, chaos, simulator, benchmarks, reports."""
