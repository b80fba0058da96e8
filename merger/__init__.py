"""The merger: reads the islands' contributions, merges each round, takes the outer step and publishes the result.

The modules `weights`, `merge_rules`, `outer`, `rounds`, `round_merge`, `committing` and `replay` are pure: they use
neither sockets nor clocks nor files.
"""
