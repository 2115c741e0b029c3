"""``codetta bench``: times of programs and of layers next to those of bare GEMMs and of others' kernels."""
