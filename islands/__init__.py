"""What one island does: the model, its text, the inner steps, and the outer gradients that it sends."""
