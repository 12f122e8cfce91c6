"""Every kind of pattern."""
