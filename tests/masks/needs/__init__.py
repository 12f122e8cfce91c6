"""Which keys a set of queries needs."""
