"""What the cost model says of the rows that are measured here. Modelled, from measured inputs."""
