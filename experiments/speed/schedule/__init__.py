"""Compiled train steps, for chips that need not be present: what they exchange, and beside what."""
