"""Checks of compiled train steps: what they exchange, and during what; chips need not be here."""
