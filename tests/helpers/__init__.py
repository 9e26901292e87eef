"""What several test files need, by subject."""
