"""attend: what any engine computes, and what a call refuses."""
