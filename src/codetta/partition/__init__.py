"""From a tensor graph to a plan of GEMM programs, finalizes and leftovers."""
