"""The loops that are timed: of nodes in lockstep, of buckets, and of nodes that wait for nobody."""
