"""Daemons that are broken on purpose, to show that the soak finds it. Each is Python that runs in a daemon's process first."""

from __future__ import annotations

SABOTAGE: dict[str, str] = {}
