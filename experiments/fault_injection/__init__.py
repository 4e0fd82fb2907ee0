"""A training job whose processes are killed at random moments: `python -m` runs it."""
