"""The client sans I/O: flows are generators that yield effects, and the transports perform them."""
