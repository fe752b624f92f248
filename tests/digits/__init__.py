"""Trainings of the examples that start sooner: see `sklearn`, `scipy` and `sitecustomize` beside this file."""

from __future__ import annotations

from pathlib import Path

LIGHT_DIGITS = {"PYTHONPATH": str(Path(__file__).parent)}
"""What a job's environment has for it."""
