"""One island: models, data, inner steps, and the worker that trains with them."""
