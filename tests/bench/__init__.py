"""The table of `make bench`: its frame, and a small guard of its ratios."""
