"""The core of an island, for any training loop: link, ledger, replica, adoption, recovery.

It handles named arrays and knows no model, no data and no optimiser.
"""
