"""The small corpus of the integration tests."""

from __future__ import annotations

from tests.integration.conftest import corpus_folder

__all__ = ["corpus_folder"]
