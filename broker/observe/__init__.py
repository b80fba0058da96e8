"""Logs, metrics for Prometheus, and metric curves: what every worker reports about itself."""
