"""What became of a model, what it costs, and whether it is right."""
