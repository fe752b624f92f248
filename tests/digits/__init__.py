"""Trainings of the examples that start sooner: see `sklearn`, `scipy` and `sitecustomize` beside this file."""

from __future__ import annotations

from pathlib import Path

LIGHT_DIGITS = {"PYTHONPATH": str(Path(__file__).parent)}
"""What a job's environment has for it."""

STOPPED_AFTER = "TEST_STOPPED_AFTER"
"""Names a variable: the rank that prints this text waits there until it is told to stop, however late that is."""
