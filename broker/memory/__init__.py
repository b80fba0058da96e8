"""A broker in dictionaries, for tests and virtual time."""
