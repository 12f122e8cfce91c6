"""Generation and the key/value cache."""
