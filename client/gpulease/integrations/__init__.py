"""Plugins for the tools that start training runs and tests. Each module is loaded by its tool, and only then."""
