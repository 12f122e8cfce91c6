"""What was built is kept: plans, block tables and programs, in bounded memory."""
