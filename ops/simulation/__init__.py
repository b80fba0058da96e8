"""`archipelago simulate`: failures and links in virtual time, and a plan before a run."""
