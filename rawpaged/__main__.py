"""`python -m rawpaged` is the `rawpaged` command."""

import sys

from rawpaged.cli import main

sys.exit(main())
