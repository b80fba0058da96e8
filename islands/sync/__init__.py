"""The core of an island, for any training loop: participant, ledger, connection, replica, adoption, recovery.

It handles named arrays and knows no model, no data and no optimiser.
"""
