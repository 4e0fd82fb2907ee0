"""A model that is sharded inside its nodes, beside one that each device of a node has whole."""
