"""The small corpus and the certificates of the integration tests, and processes that end with their test."""

from __future__ import annotations

from tests.integration.conftest import certificates, config, corpus, corpus_folder, processes, tls

__all__ = ["certificates", "config", "corpus", "corpus_folder", "processes", "tls"]
