"""Metrics of jobs: readings of their GPUs as time series of bounded size."""
