"""Jobs on this node: launched, supervised, logged, and cleaned up."""
