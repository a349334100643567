"""``python -m tiltsam``."""

import sys

from tiltsam.cli import main

sys.exit(main())
