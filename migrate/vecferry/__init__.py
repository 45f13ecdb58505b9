"""Migrate a vector index from one embedding model to another without re-encoding the corpus, and prove it."""

from __future__ import annotations

__version__ = "0.1.0"
