"""Cells on Slurm: submission, states, attempts and their budgets, following to the end."""
