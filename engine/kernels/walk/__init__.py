"""The walk over a step's operations: `step.py` says how threads share them, the others what each does."""
