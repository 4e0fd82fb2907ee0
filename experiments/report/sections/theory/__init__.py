"""What the papers prove: how fast averages and gradients shrink."""
