"""The connection of an island to its broker: queues between the training thread and the threads that talk to Redis."""
