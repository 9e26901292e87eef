"""Small models of every kind that the package serves, and their checkpoints."""
