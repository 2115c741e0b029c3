"""From a captured segment to something that PyTorch can call and differentiate."""
