"""Published algorithms as a user writes them, with `gx.gossip`."""

import optax

import gossipjax as gx


def dpsgd(schedule, **options):
    """D-PSGD (Lian et al. 2017, algorithm 1)."""

    def combine(x, u, node):
        return optax.tree.add(node.mix(x), u)

    return gx.gossip(schedule, combine, **options)


def gradient_tracking(schedule, **options):
    """DSGT (Pu and Nedic 2021) and, where it is not doubly stochastic, Push-DIGing."""

    def combine(x, u, node):
        y = optax.tree.add(node.kept["c"], u)
        x, y = node.mix((optax.tree.add(x, y), y))
        return x, {"c": optax.tree.sub(y, u)}

    return gx.gossip(schedule, combine, keeps={"c": "restart"}, **options)
