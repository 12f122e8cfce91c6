"""What this machine computes fastest, measured and kept."""
