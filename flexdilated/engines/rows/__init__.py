"""A few queries over the keys that each sees, without a plan."""
