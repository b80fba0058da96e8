"""What every worker shows of itself: logs, metrics for Prometheus, and curves."""
