"""Checks of compiled train steps: what they exchange, and beside what; chips need not be here."""
