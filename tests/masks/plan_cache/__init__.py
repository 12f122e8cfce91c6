"""The cache of plans."""
