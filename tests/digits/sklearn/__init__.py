"""Stands in for scikit-learn in the ranks of a test: the same images, without the second that its import takes.

A job has it by `environment=LIGHT_DIGITS` of tests/digits. tests/torch trains with the real one.
"""
