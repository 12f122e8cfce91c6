"""The patterns, a file for each family; a new one is one more file here."""
