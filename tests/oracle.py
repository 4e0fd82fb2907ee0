"""The dense float64 oracle: plain NumPy on `[N, D]` arrays and `[T, N, N]` matrices.

It shares no code with the package: it knows nothing of slots, buffers, axes or pytrees.
"""

from collections.abc import Callable

import numpy as np


def allreduce(matrices, x, updates):
    """Every node takes the mean update: yields (z, x, w), each `[N, D]` or `[N]`, per step."""
    for u in updates:
        x = x + u.mean(axis=0, keepdims=True)
        yield x, x, np.ones(len(x))


def dpsgd_combine_while_adapting(matrices, x, updates):
    for k, u in enumerate(updates):
        x = matrices[k % len(matrices)] @ x + u
        yield x, x, np.ones(len(x))


def dpsgd_adapt_then_combine(matrices, x, updates):
    for k, u in enumerate(updates):
        x = matrices[k % len(matrices)] @ (x + u)
        yield x, x, np.ones(len(x))


def sgp(matrices, z, updates):
    x, w = z, np.ones(len(z))
    for k, u in enumerate(updates):
        P = matrices[k % len(matrices)]
        x, w = P @ (x + u), P @ w
        yield x / w[:, None], x, w


def osgp(matrices, z, updates, overlap, biased=False):
    """Every message is a letter with its date of arrival: yields (z, x, w) of what has arrived."""
    x, w, letters = z, np.ones(len(z)), []
    for k, u in enumerate(updates):
        x = x + u
        if k % overlap == 0:
            P = matrices[k // overlap % len(matrices)]
            own, others = np.diag(np.diag(P)), P - np.diag(np.diag(P))
            letters.append((k + overlap, others @ x, others @ w))
            x, w = own @ x, own @ w
        for date, numerators, weights in letters:
            if date == k:
                x, w = x + numerators, w + weights
        yield (x, x, np.ones(len(x))) if biased else (x / w[:, None], x, w)


def adpsgd(matrices, x, updates, delays):
    """Yields (the model of the next gradient, the latest one, 1); keeps all models there were."""
    models = [x]
    for k, u in enumerate(updates):
        models.append(matrices[k % len(matrices)] @ models[-1] + u)
        ages = delays[(k + 1) % len(delays)]
        held = [models[max(0, k + 1 - age)][node] for node, age in enumerate(ages)]
        yield np.stack(held), models[-1], np.ones(len(x))


def easgd(matrices, x, updates, alpha, period):
    center = x.mean(axis=0)
    for k, u in enumerate(updates):
        d = alpha * (x - center) if k % period == 0 else 0 * x
        x, center = x + u - d, center + d.sum(axis=0)
        yield x, x, np.ones(len(x))


def train_sgp(matrices, z, gradient: Callable, optimizer: Callable, steps: int):
    """SGP with a stateful local optimizer: `optimizer(memory, k, g, z) -> u`, gradients at z."""
    x, w = z, np.ones(len(z))
    memories = [{} for _ in z]
    for k in range(steps):
        P = matrices[k % len(matrices)]
        g = gradient(z, k)
        u = np.stack([optimizer(memories[i], k, g[i], z[i]) for i in range(len(z))])
        x, w = P @ (x + u), P @ w
        z = x / w[:, None]
        yield z, w


def sgd(rate, momentum=0.0, nesterov=False, decay=0.0):
    def step(memory, k, g, z):
        g = g + decay * z
        memory["m"] = momentum * memory.get("m", 0.0) + g
        return -rate * (g + momentum * memory["m"] if nesterov else memory["m"])

    return step


def adamw(rate, b1=0.9, b2=0.999, eps=1e-8, decay=1e-4):
    def step(memory, k, g, z):
        memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * g
        memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * g**2
        m, v = memory["m"] / (1 - b1 ** (k + 1)), memory["v"] / (1 - b2 ** (k + 1))
        return -rate * (m / (np.sqrt(v) + eps) + decay * z)

    return step


def clipped(largest, optimizer):
    def step(memory, k, g, z):
        norm = np.linalg.norm(g)
        return optimizer(memory, k, g * min(1.0, largest / norm), z)

    return step


def accumulated(every, optimizer):
    """The mean of `every` gradients at the last of as many steps; nothing at the others."""

    def step(memory, k, g, z):
        memory["sum"] = memory.get("sum", 0.0) + g
        if k % every != every - 1:
            return np.zeros_like(g)
        total, memory["sum"] = memory["sum"], 0.0
        return optimizer(memory.setdefault("inner", {}), k // every, total / every, z)

    return step


def column_stochastic(rng, n, rounds=3):
    """Random irregular digraphs over a directed ring, so that weights leave 1: `[T, N, N]`."""
    edges = rng.random((rounds, n, n)) < 1.2 / n
    matrices = (edges | np.roll(np.eye(n, dtype=bool), 1, axis=0)) * rng.random((rounds, n, n))
    matrices += np.eye(n) * (0.2 + rng.random((rounds, 1, n)))
    return matrices / matrices.sum(axis=1, keepdims=True)


def peers(rng, n, count):
    """`count` peers per round at hops that change from round to round: `[3, N, N]`."""
    eye = np.eye(n)
    hops = [[(k + i) % max(1, n - 1) + 1 for i in range(count)] for k in range(3)]
    return np.stack(
        [(eye + sum(np.roll(eye, hop, axis=0) for hop in hs)) / (count + 1) for hs in hops]
    )


def random_peer(rng, n):
    """Every sender draws its receiver: some nodes hear nothing, some several: `[4, N, N]`."""
    matrices = np.stack([np.eye(n) / 2] * 4)
    for k, matrix in enumerate(matrices):
        for sender in range(n):
            # The last round is a ring, so that all nodes are connected.
            hop = 1 if k == 3 or n == 1 else rng.integers(1, n)
            matrix[(sender + hop) % n, sender] += 1 / 2
    return matrices


def doubly_stochastic(rng, n):
    """A directed ring, the exact average and a pairing with unequal weights: `[T, N, N]`."""
    eye = np.eye(n)
    ring = 0.3 * eye + 0.7 * np.roll(eye, 1, axis=0)
    swap = eye[rng.permutation(n)]
    return np.stack([ring, np.full((n, n), 1 / n), 0.6 * eye + 0.2 * swap + 0.2 * swap.T])
