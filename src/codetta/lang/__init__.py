"""The language: a Python function becomes a Program, a Program becomes text, the text becomes the Program again."""
