"""For how long a reading stands, wherever time is counted from readings."""

GAP_S = 3.0
"""A reading that comes later than this after the previous one does not cover the time between: a node may be silent for
this long before its GPUs are unknown."""
FIRST_READING_S = 1.0
"""Time that the first reading after a gap covers: the period of readings, and the longest over which a driver averages
utilization."""
