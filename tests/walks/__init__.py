"""The first hour, walked again: what a researcher, an administrator and the author of a sweep type first.

Each step has a command, what it printed when three new users walked (`before`), and what must and must not be in it
now. `python -m tests.walks` prints all of it; `test_walks` checks it in the slow lane.
"""
