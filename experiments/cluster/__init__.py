"""Programs and scripts that start the same training on a cluster."""
