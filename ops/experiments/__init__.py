"""Experiments in virtual time: parity, studies, both frameworks in one run, and the replay of recorded runs."""
