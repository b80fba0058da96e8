"""Experiments in virtual time: parity, studies, time to loss, and the replay of recorded runs."""
