"""The tensor graph: its op table, builders, programs, legality and verifier."""
