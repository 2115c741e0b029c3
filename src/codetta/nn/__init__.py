"""Operators for those who want these alone, without a compiled model."""
