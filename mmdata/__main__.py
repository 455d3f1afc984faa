"""`python -m mmdata COMMAND …`: the `mmdata` command where the environment's bin folder is not on the path."""

import sys

from mmdata.cli import main

sys.exit(main())
