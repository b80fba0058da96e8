"""The merger: reads the islands' contributions, merges each round, takes the outer step and publishes the result.

The modules `accounts`, `claims`, `outer`, `rounds`, `scores` and `weights` are pure: they use neither sockets nor
clocks nor files. `merge_rules` and `round_merge` use a clock only to share threads, which changes no bit.
"""
