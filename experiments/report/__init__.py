"""The evidence: the papers' tables and figures in miniature, from one command."""
