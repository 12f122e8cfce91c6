"""describe, explain, plot and show."""
