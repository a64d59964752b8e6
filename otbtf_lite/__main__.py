"""``python -m otbtf_lite``: the same as the ``otbtf-lite`` command."""

import sys

from otbtf_lite.cli import main

sys.exit(main())
