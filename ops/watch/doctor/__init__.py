"""`archipelago doctor`: checks of a site before it joins a run."""
