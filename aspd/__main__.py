"""`python -m aspd`."""

import sys

from aspd import main

sys.exit(main())
