"""Several hosts on this machine: their processes, and links of a limited bandwidth between them."""
