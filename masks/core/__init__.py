"""What every pattern is made of: Pattern, Mixture and Bound, their algebra, boxes and progressions, ranges, checks."""
