"""Random conversations with a cached model, and what each of their tokens may see."""
