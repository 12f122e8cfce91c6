"""Orders of tokens."""
