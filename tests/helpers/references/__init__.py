"""What results are compared with, and how they are measured."""
