"""What a call holds in memory, predicted."""
