"""Tests that launch jobs, one after the other; each asks for the settings that it needs."""

from __future__ import annotations

from launcher import forget_settings

forget_settings()
