"""Keys that given queries attend to."""
