"""What a process says about itself."""
