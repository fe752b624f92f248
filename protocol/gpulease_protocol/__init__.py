"""The contract: what daemon, worker, client and program say to each other. Standard library only."""
