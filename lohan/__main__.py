"""`python -m lohan` is `lohan`."""

import sys

from lohan.cli import main

sys.exit(main())
