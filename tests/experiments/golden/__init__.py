"""Values of independent implementations, and the programs that print them."""
