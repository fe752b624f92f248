"""Leader election: one daemon writes to a database, and others stand by."""
