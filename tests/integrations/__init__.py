"""Models of other libraries: what they compute by themselves, they compute with this library's attention too."""
