"""The checks that users run on their own attention."""
