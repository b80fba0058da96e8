"""The models that islands train, and the parts that they are made of."""
