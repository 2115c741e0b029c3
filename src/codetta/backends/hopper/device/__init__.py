"""What runs inside kernels. Part of every kernel's key: a change here compiles them all anew."""
