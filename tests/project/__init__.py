"""Documentation, docstrings and the rooms themselves."""
