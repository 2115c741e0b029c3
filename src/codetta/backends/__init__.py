"""Plan -> callable, one package per target."""
