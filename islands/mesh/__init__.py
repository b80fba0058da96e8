"""One island over several devices of its machine."""
