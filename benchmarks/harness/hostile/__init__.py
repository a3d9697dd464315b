"""Hostile and unlucky input: one table of faults by kind and command, and what runs a command under a fault."""
