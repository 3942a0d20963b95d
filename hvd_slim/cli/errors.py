"""How the command ends."""

from __future__ import annotations

OK, FAILED, MISUSED = 0, 1, 2  # exit statuses: done; a problem was found or the work failed; the command makes no sense


class UsageError(Exception):
    """What the user asked for cannot be done; one line that says why, and what to do instead."""
