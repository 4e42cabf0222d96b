"""Verbs of the command line about runs and faults that are there."""
