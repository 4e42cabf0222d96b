"""The processes of an attempt: how they start, what they show of themselves, how they end."""
