"""A new algorithm beside five known ones: 16 simulated nodes, three seeds, a table and curves.

    python -m experiments.examples.own_algorithm

It is the same as

    python -m experiments.compare --algorithm experiments.examples.own_algorithm:heavy_ball \\
      dpsgd sgp gradient-tracking local allreduce --dirichlet-alpha 0.1 \\
      -- --nodes 16 --model mlp --optimizer sgd

Copy the function into `my_module.py`, and name it `--algorithm my_module:heavy_ball`, or with a
topology, `my_module:heavy_ball@torus`.
"""

import sys

import optax

import gossipjax as gx
from experiments.compare import __main__ as compare

BETA = 0.5


def heavy_ball(schedule):
    """D-PSGD whose gossip has momentum: `m <- beta m + P x - x`, `x <- x + m + u`."""

    def combine(x, u, node):
        pull = optax.tree.sub(node.mix(x), x)
        m = optax.tree.add(optax.tree.scale(BETA, node.kept["m"]), pull)
        return optax.tree.add(x, m, u), {"m": m}

    return gx.gossip(schedule, combine, keeps={"m": "restart"})


OTHERS = ("dpsgd", "sgp", "gradient-tracking", "local", "allreduce")
SETTINGS = ("--nodes", "16", "--model", "mlp", "--optimizer", "sgd")


def main(others=OTHERS, arguments=(), settings=SETTINGS):
    """Compares it; `arguments` are more of those of the comparison."""
    names = ("experiments.examples.own_algorithm:heavy_ball", *others)
    compare.main(
        ["--algorithm", *names, "--dirichlet-alpha", "0.1", *arguments, "--", *settings],
    )


if __name__ == "__main__":
    main(arguments=sys.argv[1:])
