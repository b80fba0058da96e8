"""The merger: reads the islands' contributions, merges each round, takes the outer step and publishes the result.

The modules `accounts`, `claims`, `merge_rules`, `outer`, `round_merge`, `rounds`, `scores` and `weights` are pure: they
use neither sockets nor clocks nor files.
"""
