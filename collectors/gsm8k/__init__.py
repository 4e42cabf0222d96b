"""GSM8K on the control side: real questions into 5-shot prompts, answers into scores. Standard library only."""
