"""Hydra finds the launcher in `launcher.py`."""
