"""Looking at patterns: how many pairs cells hold, what a pattern costs and reaches, why a pair is allowed, pictures."""
