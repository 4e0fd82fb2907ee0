"""One file per algorithm; each returns an `optax.GradientTransformationExtraArgs`."""
