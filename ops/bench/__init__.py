"""`archipelago bench`: measurements, each of ratios within one run, so that a busy machine slows both sides."""
