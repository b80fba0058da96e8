"""One island over several processes, usually one on each host. The first one leads, and alone talks to Redis."""
