"""What other libraries compute, as tables of calls and models, each with the module that compares ours with it."""
