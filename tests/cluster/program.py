"""Finds its place in a job and averages once over all; then ends, fails or waits for SIGTERM.

python program.py end|fail|wait
"""

import signal
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import gossipjax as gx
from gossipjax import launch


def main() -> None:
    what = sys.argv[1]
    place = launch.initialize()
    mesh = launch.mesh()
    nodes = mesh.shape["nodes"]
    schedule = gx.topology.one_peer_exponential(nodes)

    def average(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.psum(x, "nodes"), gx.mix(x, weight, schedule, 0)[0]

    def of_nodes(values: np.ndarray) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec("nodes"))
        return jax.make_array_from_callback((nodes,), sharding, values.__getitem__)

    values = np.arange(nodes, dtype=np.float32)
    total, mixed = gx.spmd(average, mesh=mesh)(of_nodes(values), of_nodes(np.ones_like(values)))
    expected = schedule.matrices()[0] @ values
    for sums, means in zip(total.addressable_shards, mixed.addressable_shards, strict=True):
        np.testing.assert_array_equal(sums.data, values.sum())
        np.testing.assert_allclose(means.data, expected[means.index], rtol=1e-6)
    print(f"process {place.process} of {place.processes}: averaged", flush=True)
    if what == "fail" and place.process == place.processes - 1:
        raise RuntimeError("as asked for")
    if what != "end":
        signal.signal(signal.SIGTERM, on_sigterm)
        time.sleep(600)


def on_sigterm(*_: object) -> None:
    print("got SIGTERM", flush=True)
    launch.leave(0)


if __name__ == "__main__":
    main()
