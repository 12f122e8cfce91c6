"""What a plan is made of: a branch as terms in some order of tokens."""
