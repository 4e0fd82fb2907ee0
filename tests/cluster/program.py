"""Joins a job and averages once over all nodes; then exits, fails or waits for SIGTERM.

python program.py exit|fail|wait
"""

import signal
import sys
import time

import jax
import numpy as np

import gossipjax as gx
from gossipjax import launch


def main() -> None:
    ending = sys.argv[1]
    info = launch.initialize()
    nodes = gx.Nodes(mesh=launch.mesh())
    schedule = gx.topology.one_peer_exponential(nodes.size)

    def average(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.psum(x, "nodes"), gx.mix(x, weight, schedule, 0)[0]

    values = np.arange(nodes.size, dtype=np.float32)
    local_values = values[nodes.local]
    total, mixed = nodes.run(
        average, nodes.put(local_values), nodes.put(np.ones_like(local_values))
    )
    expected = schedule.matrices()[0] @ values
    np.testing.assert_array_equal(nodes.to_host(total), np.full(nodes.size, values.sum()))
    np.testing.assert_allclose(nodes.to_host(mixed), expected, rtol=1e-6)
    print(f"process {info.process_id} of {info.num_processes}: averaged", flush=True)
    if ending == "fail" and info.process_id == info.num_processes - 1:
        time.sleep(1)  # mpirun would mix the lines of the others into the traceback
        raise RuntimeError("as asked for")
    if ending != "exit":
        signal.signal(signal.SIGTERM, exit_on_sigterm)
        time.sleep(600)


def exit_on_sigterm(*_: object) -> None:
    print("got SIGTERM", flush=True)
    launch.exit_process(0)


if __name__ == "__main__":
    main()
