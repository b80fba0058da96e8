"""Start runs: `up`, `init` and `prepare`, an embedded Redis, and child processes that are kept alive."""
