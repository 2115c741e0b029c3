"""What the author of an epilogue works with: a new file, and one command that checks it."""
