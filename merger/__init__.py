"""The merger: takes the islands' contributions from the broker, merges each round, takes the outer step, publishes.

Pure parts: weights, merge_rules, clip, outer, pace. They know neither sockets nor clocks nor files.
"""
