"""Models with patterns in training frameworks."""
