"""Start runs: `up`, `init` and `prepare`, an embedded Redis, and the supervision of child processes."""
