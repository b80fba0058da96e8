"""Redis, Valkey or fakeredis: connections, key names, chunks, leases, and what each role reads and writes."""
