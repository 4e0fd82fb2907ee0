"""Methods of papers as functions of a schedule; docs/your_algorithm.md explains them."""

import jax
import jax.numpy as jnp
import optax

import gossipjax as gx


def proxskip(schedule, beta):
    """ProxSkip, and LED at fixed steps: each local step is corrected by `y`."""

    def combine(x, u, node):
        z = optax.tree.sub(optax.tree.add(x, u), node.kept["y"])
        x = node.mix(z)
        y = optax.tree.add_scale(node.kept["y"], beta, optax.tree.sub(z, x))
        return x, {"y": y}

    return gx.gossip(schedule, combine, keeps={"y": "restart"})


def kgt(schedule, K):
    """K-GT: tracks the gradients over K local steps."""

    def combine(x, u, node):
        u = optax.tree.add(u, node.kept["c"])
        s = optax.tree.add(node.kept["s"], u)
        x, mixed = node.mix((optax.tree.add(x, u), s))
        c = optax.tree.add_scale(node.kept["c"], 1 / K, optax.tree.sub(mixed, s))
        goes_on = (node.step + 1) % K != 0
        s = optax.tree.where(goes_on, s, optax.tree.zeros_like(s))
        return x, {"c": c, "s": s}

    return gx.gossip(
        schedule.every(K, phase=K - 1), combine, keeps={"c": "restart", "s": "restart"}
    )


def gut(schedule, mu):
    """GUT without momentum: tracks the last movement in one message."""

    def combine(x, u, node):
        y = optax.tree.add(x, u)
        x = node.mix(optax.tree.add_scale(y, mu, node.kept["c"]))
        return x, {"c": optax.tree.sub(x, y)}

    return gx.gossip(schedule, combine, keeps={"c": "restart"})


def decentlam(schedule, rate, beta=0.9):
    """DecentLaM: the neighbours' pull is a part of the momentum. Takes gradients."""

    def combine(x, g, node):
        mixed = node.mix(optax.tree.add_scale(x, -node.rate, g))
        pull = optax.tree.scale(1 / node.rate, optax.tree.sub(x, mixed))
        m = optax.tree.add_scale(pull, beta, node.kept["m"])
        return optax.tree.add_scale(x, -node.rate, m), {"m": m}

    return gx.gossip(
        schedule,
        combine,
        keeps={"m": "average"},
        takes_gradients=True,
        rate=rate,
    )


def muffliato(schedule, K, noise, seed=0):
    """Muffliato: adds noise once, and mixes K times, accelerated."""
    gap = gx.topology.spectral_gap(schedule)
    a = 2 * (1 - (gap * (1 - gap / 4)) ** 0.5) / (1 - gap / 2) ** 2

    def combine(x, u, node):
        drawn = optax.tree.random_like(node.key, x)
        last = optax.tree.add_scale(optax.tree.add(x, u), noise, drawn)
        x = node.mix(last)
        for _ in range(K - 1):
            ahead = optax.tree.scale(a, node.mix(x))
            x, last = optax.tree.add_scale(ahead, 1 - a, last), x
        return x

    return gx.gossip(schedule, combine, models=K, seed=seed)


def epidemic(schedule):
    """EL-Local: the plain mean of the own model and of those that came."""

    def combine(x, u, node):
        x = optax.tree.add(x, u)
        heard, weights = node.receive(x)
        models = 1 + jnp.sum(weights > 0)
        return jax.tree.map(lambda x, heard: (x + heard.sum(0)) / models, x, heard)

    return gx.gossip(schedule, combine, row_stochastic=True)


def polar(v):
    """Returns the orthogonal factor of a matrix; of a vector, its direction."""
    # On an accelerator, Newton-Schulz steps are quicker.
    if v.ndim < 2:
        return v / (jnp.linalg.norm(v) + 1e-8)
    left, _, right = jnp.linalg.svd(v, full_matrices=False)
    return left @ right


def demuon(schedule, rate, b=0.9):
    """DeMuon: tracks the momentum, and makes it orthogonal. Takes gradients."""

    def combine(x, g, node):
        m = optax.tree.update_moment(g, node.kept["m"], b, 1)
        change = optax.tree.sub(m, node.kept["m"])
        v = node.mix(optax.tree.add(node.kept["v"], change))
        x = node.mix(optax.tree.add_scale(x, -node.rate, jax.tree.map(polar, v)))
        return x, {"m": m, "v": v}

    return gx.gossip(
        schedule,
        combine,
        keeps={"m": "restart", "v": "restart"},
        takes_gradients=True,
        rate=rate,
    )


def decaf(schedule):
    """DeCAF: averages the products of factors, and cuts the average to their rank."""

    def combine(x, u, node):
        x = optax.tree.add(x, u)
        heard, weights = node.receive(x)

        def average(own, heard):
            mean = (1 - weights.sum()) * own["b"] @ own["a"]
            mean += jnp.einsum("n,ndr,nrk->dk", weights, heard["b"], heard["a"])
            left, root, right = jnp.linalg.svd(mean, full_matrices=False)
            rank, root = len(own["a"]), jnp.sqrt(root)[:, None]
            return {"b": (left * root.T)[:, :rank], "a": (root * right)[:rank]}

        return jax.tree.map(average, x, heard, is_leaf=lambda tree: "a" in tree)

    return gx.gossip(schedule, combine)
