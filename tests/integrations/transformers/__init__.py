"""Models of transformers, tiny and with random weights."""
