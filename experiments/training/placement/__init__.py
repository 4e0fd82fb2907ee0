"""Where nodes run: on one device or several each, or simulated on one for all."""

from experiments.training.placement.nodes import (
    Placement,
    count_devices_per_node,
    describe_nodes,
    gather_where_used,
    make_put,
    place_nodes,
    request_cpu_devices,
)

__all__ = [
    "Placement",
    "count_devices_per_node",
    "describe_nodes",
    "gather_where_used",
    "make_put",
    "place_nodes",
    "request_cpu_devices",
]
