"""Measurements: one module per question, each with a limit or a peer beside its figure."""
