"""What steps cost on a wire: processes on this machine, joined by links of a limited bandwidth."""
