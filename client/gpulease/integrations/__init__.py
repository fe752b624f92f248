"""Plugins for the tools that start trainings and tests. Each module is loaded by its tool, and only then."""
