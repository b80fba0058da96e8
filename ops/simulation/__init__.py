"""`archipelago simulate`: estimate the cost of failures and links before a machine is rented."""
