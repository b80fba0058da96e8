"""Users' tasks: a model, its loss and its batches in a file of the user, trained by our worker (`--task`)."""
