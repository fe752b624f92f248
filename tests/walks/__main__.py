"""Walks, and prints each command, what it printed before, and what it prints now."""

from __future__ import annotations

import sys

from tests.walks.hour import walk_the_first_hour

if __name__ == "__main__":
    failures = walk_the_first_hour(sys.stdout.write)
    sys.stdout.write("\n".join(["", *failures, f"{len(failures)} steps are not as they should be", ""]))
    sys.exit(bool(failures))
