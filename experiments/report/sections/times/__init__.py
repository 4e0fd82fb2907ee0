"""Sections about time: measured here, modelled, and published."""
