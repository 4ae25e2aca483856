"""`python -m weft`, the same as the command `weft`."""

import sys

from weft.cli import main

sys.exit(main())
