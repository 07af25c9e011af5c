"""`python -m cupy_kvcanary` is the command `kvcanary`."""

import sys

from .cli import main

sys.exit(main())
