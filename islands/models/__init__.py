"""The models that islands train, and what they are made of."""
