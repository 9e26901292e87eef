"""Runs of commands, examples, servers and ranks, in this process and in others."""
