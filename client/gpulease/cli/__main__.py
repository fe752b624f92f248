"""`python -m gpulease.cli`, the same program as `gpulease`."""

import sys

from gpulease.cli import main

sys.exit(main())
