"""Programs as CuTe DSL kernels on SM90: QuACK's mainloop with an epilogue generated from our IR."""
