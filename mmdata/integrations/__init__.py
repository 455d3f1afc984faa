"""The loader inside other people's training loops. Each file needs its own extra and is imported by name only."""
