"""``python -m hvd_slim`` is the ``hvd-slim`` command."""

from __future__ import annotations

import sys

from hvd_slim.cli import main

if __name__ == "__main__":
    sys.exit(main())
