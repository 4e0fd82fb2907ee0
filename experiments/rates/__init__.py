"""How the gradient at the mean shrinks with the number of steps and of nodes."""
