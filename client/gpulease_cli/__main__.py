"""`python -m gpulease_cli`, the same program as `gpulease`."""

import sys

from gpulease_cli import main

sys.exit(main())
