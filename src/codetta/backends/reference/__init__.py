"""The reference backend: PyTorch on any device, the living definition of every op."""
