"""Stands in for SciPy in the ranks of a test. Lightning's torchmetrics imports `scipy.signal`, which takes a second, to
add a name to it."""
