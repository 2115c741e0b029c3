"""The rules that reparameterise a graph, and the order in which they run."""
