"""`archipelago bench`: measurements, each as a ratio within one run."""
