"""Types of options that programs share, and the checks of their values."""
