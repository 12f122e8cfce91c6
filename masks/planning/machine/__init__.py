"""The constants of a machine from which costs are predicted."""
