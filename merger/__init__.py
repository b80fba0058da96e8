"""The merger: reads the islands' contributions, merges each round, takes the outer step and publishes the result.

The modules `claims`, `outer`, `rounds`, `scores` and `weights` are pure: they use neither sockets nor clocks nor files.
`merge_rules` and `round_merge` use a clock only to say how long spectra take, which changes no bit.
"""
