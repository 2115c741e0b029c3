"""Derivatives: one per op, and the reverse walk."""
