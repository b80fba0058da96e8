"""What any training loop needs to be an island: link, ledger, replica, adoption, recovery."""
