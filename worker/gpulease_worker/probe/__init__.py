"""The probe: a separate process that reads the GPUs, and the worker's side of it."""
