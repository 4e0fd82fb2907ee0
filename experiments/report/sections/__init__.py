"""The sections of the report, in its order."""
