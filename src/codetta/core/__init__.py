"""Types, the one immutable node, and the walks over it."""
