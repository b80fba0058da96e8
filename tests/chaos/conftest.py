"""The small corpus of the integration tests, and processes that end with their test."""

from __future__ import annotations

from tests.integration.conftest import config, corpus, corpus_folder
from tests.integration.test_processes import processes

__all__ = ["config", "corpus", "corpus_folder", "processes"]
