"""The dense float64 oracle: plain NumPy on `[N, D]` arrays and `[T, N, N]` matrices.

It shares no code with the package: it knows nothing of slots, buffers, axes or pytrees. An
algorithm `(matrices, starts, updates)` yields `(z, x, w)` after every step: the parameters that the
user holds and the numerators, `[N, D]`, and the weights `[N]`.
"""

from collections.abc import Callable

import numpy as np


def allreduce(matrices, x, updates):
    """Every node takes the mean update."""
    for u in updates:
        x = x + u.mean(axis=0, keepdims=True)
        yield x, x, np.ones(len(x))


def dpsgd(matrices, x, updates, strength=lambda k: 1.0, adapt_first=False):
    """Every node takes the share `strength(k)` of its way to the average of its neighbours."""
    for k, u in enumerate(updates):
        if adapt_first:
            x = x + u
        x = x + strength(k) * (matrices[k % len(matrices)] @ x - x)
        if not adapt_first:
            x = x + u
        yield x, x, np.ones(len(x))


def sgp(matrices, z, updates, is_damped=False):
    """What a weight below 1 holds back, if it is damped, waits in `e`."""
    x = z
    w = np.ones(len(z))
    e = np.zeros_like(z)
    for k, u in enumerate(updates):
        P = matrices[k % len(matrices)]
        part = np.minimum(1, w)[:, None] if is_damped else 1.0
        x = P @ (x + part * (e + u))
        e = (1 - part) * (e + u)
        w = P @ w
        yield x / w[:, None], x, w


def osgp(matrices, z, updates, overlap, biased=False):
    """Every message has a step of arrival; x and w are those of the messages that have arrived."""
    x = z
    w = np.ones(len(z))
    messages = []
    for k, u in enumerate(updates):
        x = x + u
        if k % overlap == 0:
            P = matrices[k // overlap % len(matrices)]
            self_weights = np.diag(np.diag(P))
            edges = P - self_weights
            messages.append((k + overlap, edges @ x, edges @ w))
            x = self_weights @ x
            w = self_weights @ w
        while messages and messages[0][0] == k:
            _, numerators, weights = messages.pop(0)
            x = x + numerators
            w = w + weights
        yield (x, x, np.ones(len(x))) if biased else (x / w[:, None], x, w)


def adpsgd(matrices, x, updates, delays):
    """z is the model of the next gradient, x the latest one; all models are kept."""
    models = [x]
    for k, u in enumerate(updates):
        models.append(matrices[k % len(matrices)] @ models[-1] + u)
        ages = delays[(k + 1) % len(delays)]
        stale = [models[max(0, k + 1 - age)][node] for node, age in enumerate(ages)]
        yield np.stack(stale), models[-1], np.ones(len(x))


def easgd(matrices, x, updates, alpha, period):
    center = x.mean(axis=0)
    for k, u in enumerate(updates):
        pull = alpha * (x - center) if k % period == 0 else 0 * x
        x = x + u - pull
        center = center + pull.sum(axis=0)
        yield x, x, np.ones(len(x))


def gradient_tracking(matrices, z, updates, is_damped=False):
    """In the form of the papers, `y <- P y + v' - v`: y follows the mean of v, and v is u.

    If it is damped, v follows the updates as fast as weights allow.
    """
    x = z
    w = np.ones(len(z))
    y = np.zeros_like(z)
    v = np.zeros_like(z)
    for k, u in enumerate(updates):
        P = matrices[k % len(matrices)]
        part = np.minimum(1, w)[:, None] if is_damped else 1.0
        before, v = v, (1 - part) * v + part * u
        y = y + v - before
        x = P @ (x + y)
        w = P @ w
        y = P @ y
        yield x / w[:, None], x, w


def d2(W, x, updates):
    """In the form of the paper, which keeps the model and the update of the step before."""
    before = np.zeros_like(x)
    old = x
    for u in updates:
        y = 2 * x - old + u - before
        old = x
        before = u
        x = W @ y
        yield x, x, np.ones(len(x))


def quasi_global(matrices, x, gradients, rate, momentum, mu, nesterov=False):
    m = np.zeros_like(x)
    for k, g in enumerate(gradients):
        local = momentum * m + g
        direction = g + momentum * local if nesterov else local
        new = matrices[k % len(matrices)] @ (x - rate(k) * direction)
        m = mu * m + (1 - mu) * (x - new) / rate(k)
        x = new
        yield x, x, np.ones(len(x))


def mixed_momentum(matrices, x, gradients, rate, momentum, nesterov=False):
    m = np.zeros_like(x)
    for k, g in enumerate(gradients):
        P = matrices[k % len(matrices)]
        m = momentum * m + g
        x = P @ (x - rate * (g + momentum * m if nesterov else m))
        m = P @ m
        yield x, x, np.ones(len(x))


def quasi_global_adam(matrices, x, gradients, rate, b1, b2, eps):
    m = np.zeros_like(x)
    v = np.zeros_like(x)
    for k, g in enumerate(gradients):
        mean = (b1 * m + (1 - b1) * g) / (1 - b1 ** (k + 1))
        square = (b2 * v + (1 - b2) * g**2) / (1 - b2 ** (k + 1))
        new = matrices[k % len(matrices)] @ (x - rate * mean / (np.sqrt(square) + eps))
        d = (x - new) / (np.linalg.norm(x - new, axis=1, keepdims=True) + 1e-8)
        m = b1 * m + (1 - b1) * d
        v = b2 * v + (1 - b2) * d**2
        x = new
        yield x, x, np.ones(len(x))


def relay(distances, x, updates):
    """No messages: a node has the models of others, as old as they are far, or else its own."""
    n = len(x)
    models = []
    for k, u in enumerate(updates):
        models.append(x + u)
        ages = np.maximum(distances - 1, 0)
        x = np.stack(
            [
                sum(models[k - age][j] if age <= k else models[k][i] for j, age in enumerate(row))
                for i, row in enumerate(ages)
            ]
        )
        x = x / n
        yield x, x, np.ones(n)


def binary_tree_distances(n):
    """Node i hangs on node (i - 1) // 2; by powers of the matrix of the edges: `[N, N]`."""
    near = np.eye(n, dtype=int)
    for i in range(1, n):
        near[i, (i - 1) // 2] = near[(i - 1) // 2, i] = 1
    reached = [np.linalg.matrix_power(near, hops) > 0 for hops in range(n)]
    return sum((~pairs).astype(int) for pairs in reached)


def choco(matrices, x, updates, gamma, compress, copies="updated"):
    """`compress(difference [D], step, node) -> [D]`: what a message says of a difference.

    With previous copies it mixes, by those of the step before, and then compresses.
    """
    W = matrices[0]
    known = np.zeros_like(x)
    for k, u in enumerate(updates):
        x = x + u
        if copies == "previous":
            x = x + gamma * (W @ known - known)
        known = known + np.stack([compress(x[i] - known[i], k, i) for i in range(len(x))])
        if copies == "updated":
            x = x + gamma * (W @ known - known)
        yield x, x, np.ones(len(x))


def deepsqueeze(matrices, x, updates, gamma, compress):
    error = np.zeros_like(x)
    for k, u in enumerate(updates):
        W = matrices[k % len(matrices)]
        y = x + u
        x = y
        if (np.eye(len(W)) != W).any():  # else nothing is sent
            q = np.stack([compress(y[i] + error[i], k, i) for i in range(len(x))])
            error = y + error - q
            x = y + gamma * (W @ q - q)
        yield x, x, np.ones(len(x))


def desloc(matrices, x, gradients, rate, b1, b2, eps, periods):
    """Local Adam, of which parameters and moments are averaged at periods of their own."""
    n = len(x)
    m, v = np.zeros_like(x), np.zeros_like(x)

    def mixed(tree, k, period):
        return matrices[k // period % len(matrices)] @ tree if k % period == 0 else tree

    for k, g in enumerate(gradients):
        m = b1 * mixed(m, k, periods[1]) + (1 - b1) * g
        v = b2 * mixed(v, k, periods[2]) + (1 - b2) * g**2
        root = np.sqrt(v / (1 - b2 ** (k + 1))) + eps
        x = mixed(x, k, periods[0]) - rate * m / (1 - b1 ** (k + 1)) / root
        yield x, x, np.ones(n)


def sparta(matrices, x, updates, draw):
    """`draw(step) -> [D]` of booleans: what is averaged."""
    n = len(x)
    for k, u in enumerate(updates):
        P = matrices[k % len(matrices)]
        x = np.where(draw(k), P @ (x + u), x + u)
        yield x, x, np.ones(n)


def robust(matrices, x, updates, rule):
    """Every node makes a rule of its own value and of what each neighbour sends."""
    x = x.copy()
    for k, u in enumerate(updates):
        P = matrices[k % len(matrices)]
        y = x + u
        for i in range(len(x)):
            heard = [j for j in range(len(x)) if j != i and P[i, j] > 0]
            x[i] = rule(y[i], y[heard], P[i, heard])
        yield x.copy(), x.copy(), np.ones(len(x))


def keep_nearest(distances, weights, liar_weight):
    """The weights, less `liar_weight` that is taken off from the farthest to the nearest."""
    kept = weights.copy()
    for j in np.argsort(distances)[::-1]:
        taken = min(liar_weight, kept[j])
        kept[j] -= taken
        liar_weight -= taken
    return kept


def pull(own, heard, weights, radius):
    for weight, difference in zip(weights, heard - own, strict=True):
        own = own + weight * difference * min(1, radius / np.linalg.norm(difference))
    return own


def clipped_gossip(own, heard, weights, radius=None, liar_weight=0.0):
    if radius is None:
        distances = np.linalg.norm(heard - own, axis=1)
        kept = keep_nearest(distances, weights, liar_weight)
        radius = np.sqrt(kept @ distances**2 / liar_weight)
    return pull(own, heard, weights, radius)


def clipped_sum(own, heard, weights, liar_weight):
    distances = np.linalg.norm(heard - own, axis=1)
    near = [d for d in distances if weights[distances > d].sum() >= 2 * liar_weight - 1e-9]
    return pull(own, heard, weights, max(near, default=0.0))


def nearest_neighbors(own, heard, weights, liar_weight):
    kept = keep_nearest(np.linalg.norm(heard - own, axis=1), weights, liar_weight)
    rest = 1 - weights.sum()
    return (rest * own + kept @ heard) / (rest + kept.sum())


def trimmed_mean(own, heard, weights, liars):
    middle = np.sort(heard, axis=0)[liars : len(heard) - liars]
    return np.concatenate([own[None], middle]).mean(axis=0)


def coordinate_median(own, heard, weights):
    return np.median(np.concatenate([own[None], heard]), axis=0)


def largest(difference, count):
    """The `count` values of the largest magnitude; 0 elsewhere."""
    result = np.zeros_like(difference)
    indices = np.argsort(-np.abs(difference))[:count]
    result[indices] = difference[indices]
    return result


def block_top_k(x, count, block):
    """The largest of each block, as the mean of those in the same of four bins; 0 elsewhere."""
    blocks = -(-len(x) // block)
    length = -(-len(x) // blocks)
    padded = np.concatenate([x, np.zeros(blocks * length - len(x))])
    result = np.zeros_like(padded)
    for start in range(0, len(padded), length):
        chosen = start + np.argsort(-np.abs(padded[start : start + length]))[:count]
        values = padded[chosen]
        scores = (values - values.mean()) / (1.5 * values.std(ddof=1))
        bins = np.clip(np.round(scores + 2), 0, 3)
        for number in range(4):
            is_in = bins == number
            if is_in.any():
                result[chosen[is_in]] = values[is_in].mean()
    return result[: len(x)]


def outer_with_feedback(
    x,
    updates,
    rate,
    every,
    keep,
    compress,
    mean_over="nodes",
    parts=(slice(None),),
    mix=0.0,
    tokens=None,
):
    """Local steps, and plain SGD along the sent parts of `p (a - x)`: yields (x, a, e).

    `p` are shares, of mean 1, of the `tokens` `[S, N]` since the last average of a part.
    """
    n = len(x)
    x = x.copy()
    anchor = x.mean(axis=0)
    error = np.zeros_like(x)
    counted = np.zeros((len(parts), n))
    for k, u in enumerate(updates):
        x = x + u
        counted += 1 if tokens is None else tokens[k]
        for f, part in enumerate(parts):
            if (k + 1 - (f + 1) * every // len(parts)) % every:
                continue
            shares = counted[f] / counted[f].mean()
            counted[f] = 0
            wanted = keep * error[:, part] + shares[:, None] * (anchor[part] - x[:, part])
            sent = np.stack([compress(e) for e in wanted])
            error[:, part] = wanted - sent
            senders = (sent != 0).sum(axis=0)
            divisor = n if mean_over == "nodes" else np.maximum(senders, 1)
            anchor[part] -= rate * sent.sum(axis=0) / divisor
            x[:, part] = mix * x[:, part] + (1 - mix) * anchor[part]
        yield x.copy(), anchor.copy(), error.copy()


def mean_of_low_rank(m, q):
    """Of matrices `[N, rows, columns]`: `M^`, what it leaves out of each, and the next `Q`."""
    p = (m @ q).mean(axis=0)
    mean = p @ np.linalg.pinv(p) @ m.mean(axis=0)  # projected onto the columns of P
    return mean, m - mean, m.mean(axis=0).T @ p


def power_sgd(matrices, x, updates, shape, q):
    """PowerSGD by definition; the first values are a matrix of this shape, and the rest travels."""
    size = int(np.prod(shape))
    error = np.zeros((len(x), *shape))
    for u in updates:
        mean, error, q = mean_of_low_rank(u[:, :size].reshape(-1, *shape) + error, q)
        x = x + np.concatenate([mean.ravel(), u[:, size:].mean(axis=0)])
        yield x, x, np.ones(len(x))


def proxskip(matrices, x, updates, beta):
    """In the form of the paper, with a control variate `h` that is added."""
    h = np.zeros_like(x)
    for k, u in enumerate(updates):
        ahead = x + u + h
        x = matrices[k % len(matrices)] @ ahead
        h = h + beta * (x - ahead)
        yield x, x, np.ones(len(x))


def kgt(matrices, x, updates, local_steps):
    """A round of `local_steps` steps begins at `start`."""
    start = x
    c = np.zeros_like(x)
    for k, u in enumerate(updates):
        x = x + u + c
        if (k + 1) % local_steps == 0:
            W = matrices[k // local_steps % len(matrices)]
            z = (start - x) / local_steps
            c = c + z - W @ z
            x = start = W @ x
        yield x, x, np.ones(len(x))


def scaffold(x, updates, local_steps):
    """A server keeps a model and the mean of the controls; all clients start from its model."""
    server = x.mean(axis=0)
    controls = np.zeros_like(x)
    for k, u in enumerate(updates):
        mean = controls.mean(axis=0)
        x = x + u - controls + mean
        if (k + 1) % local_steps == 0:
            controls = controls - mean + (x - server) / local_steps
            server = x.mean(axis=0)
            x = np.tile(server, (len(x), 1))
        yield x, x, np.ones(len(x))


def gut(W, x, updates, mu):
    """As the authors' program at a rate of 1: `x` before, and what the user holds after mixing."""
    before = x
    delta = np.zeros_like(x)
    for u in updates:
        tracked = W @ (x - before) + W @ before - before
        last, delta = delta, -u - (W @ x - x)
        before, x = x, x - (delta - mu * tracked - mu * last)
        yield W @ x, W @ x, np.ones(len(x))


def decentlam(matrices, x, gradients, rate, beta):
    """As a heavy ball: the last movement goes on, in the measure of the rates."""
    last = x
    for k, g in enumerate(gradients):
        push = beta * rate(k) / rate(max(0, k - 1)) * (x - last)
        last, x = x, matrices[k % len(matrices)] @ (x - rate(k) * g) + push
        yield x, x, np.ones(len(x))


def muffliato(W, x, updates, rounds, noises):
    """The polynomial of the accelerated rounds, in the eigenvalues of W."""
    values, vectors = np.linalg.eigh(W)
    gap = 1 - np.sort(abs(values))[-2]
    a = 2 * (1 - np.sqrt(gap * (1 - gap / 4))) / (1 - gap / 2) ** 2
    powers = [np.ones_like(values), values]
    while len(powers) <= rounds:
        powers.append(a * values * powers[-1] + (1 - a) * powers[-2])
    for u, noise in zip(updates, noises, strict=True):
        x = vectors * powers[rounds] @ vectors.T @ (x + u + noise)
        yield x, x, np.ones(len(x))


def epidemic(matrices, x, updates):
    """The plain mean of what a node has and hears."""
    for k, u in enumerate(updates):
        heard = matrices[k % len(matrices)] > 0
        x = heard @ (x + u) / heard.sum(axis=1, keepdims=True)
        yield x, x, np.ones(len(x))


def demuon(matrices, x, gradients, rate, b, shape):
    """The first columns are a matrix of this shape; its polar factor is `V (V' V)^(-1/2)`."""
    size = np.prod(shape)
    m, v = np.zeros_like(x), np.zeros_like(x)

    def polar(v):
        matrix = v[:size].reshape(shape)
        values, vectors = np.linalg.eigh(matrix.T @ matrix)
        polar = matrix @ (vectors / np.sqrt(values)) @ vectors.T
        return np.concatenate([polar.ravel(), v[size:] / np.linalg.norm(v[size:])])

    for k, g in enumerate(gradients):
        W = matrices[k % len(matrices)]
        last, m = m, b * m + (1 - b) * g
        v = W @ (v + m - last)
        x = W @ (x - rate * np.stack([polar(row) for row in v]))
        yield x, x, np.ones(len(x))


def decaf(matrices, b, a, move, steps):
    """`b [N, d, r]` and `a [N, r, k]`; `move(b, a) -> (b, a)`. Yields the products `b a`."""
    rank = a.shape[1]
    for k in range(steps):
        b, a = move(b, a)
        mean = np.tensordot(matrices[k % len(matrices)], b @ a, 1)
        left, values, right = np.linalg.svd(mean)
        root = np.sqrt(values[:, :rank])
        b, a = left[:, :, :rank] * root[:, None], root[:, :, None] * right[:, :rank]
        yield b @ a


def train_sgp(matrices, z, gradient: Callable, optimizer: Callable, steps: int):
    """SGP with a stateful local optimizer, `optimizer(state, k, g, z) -> u`: yields (z, w)."""
    x = z
    w = np.ones(len(z))
    states = [{} for _ in z]
    for k in range(steps):
        P = matrices[k % len(matrices)]
        g = gradient(z, k)
        u = np.stack([optimizer(states[i], k, g[i], z[i]) for i in range(len(z))])
        x = P @ (x + u)
        w = P @ w
        z = x / w[:, None]
        yield z, w


def sgd(learning_rate, momentum=0.0, nesterov=False, decay=0.0):
    def step(state, k, g, z):
        g = g + decay * z
        state["m"] = momentum * state.get("m", 0.0) + g
        return -learning_rate * (g + momentum * state["m"] if nesterov else state["m"])

    return step


def adamw(learning_rate, b1=0.9, b2=0.999, eps=1e-8, decay=1e-4):
    def step(state, k, g, z):
        state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
        state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
        m = state["m"] / (1 - b1 ** (k + 1))
        v = state["v"] / (1 - b2 ** (k + 1))
        return -learning_rate * (m / (np.sqrt(v) + eps) + decay * z)

    return step


def accumulated(every, optimizer):
    """The mean of `every` gradients at the last of as many steps; 0 at the others."""

    def step(state, k, g, z):
        state["sum"] = state.get("sum", 0.0) + g
        if k % every != every - 1:
            return np.zeros_like(g)
        mean = state["sum"] / every
        state["sum"] = 0.0
        return optimizer(state.setdefault("inner", {}), k // every, mean, z)

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
    matrices = []
    for k in range(3):
        hops = [(k + i) % max(1, n - 1) + 1 for i in range(count)]
        edges = sum(np.roll(eye, hop, axis=0) for hop in hops)
        matrices.append((eye + edges) / (count + 1))
    return np.stack(matrices)


def random_peer(rng, n):
    """Every sender draws its receiver: some nodes receive nothing, some several: `[4, N, N]`."""
    matrices = np.stack([np.eye(n) / 2] * 4)
    for k, matrix in enumerate(matrices):
        for sender in range(n):
            # The last round is a ring, so that all nodes are connected.
            hop = 1 if k == 3 or n == 1 else rng.integers(1, n)
            matrix[(sender + hop) % n, sender] += 1 / 2
    return matrices


def lazy_ring(n):
    """Symmetric, with no negative eigenvalue: `[N, N]`."""
    eye = np.eye(n)
    return 2 / 3 * eye + (np.roll(eye, 1, axis=0) + np.roll(eye, -1, axis=0)) / 6


def static_ring(rng, n):
    """Both neighbours on a ring: `[1, N, N]`, symmetric."""
    eye = np.eye(n)
    return (0.4 * eye + 0.3 * np.roll(eye, 1, axis=0) + 0.3 * np.roll(eye, -1, axis=0))[None]


def doubly_stochastic(rng, n):
    """A directed ring, the exact average and a pairing with unequal weights: `[T, N, N]`."""
    eye = np.eye(n)
    ring = 0.3 * eye + 0.7 * np.roll(eye, 1, axis=0)
    swap = eye[rng.permutation(n)]
    return np.stack([ring, np.full((n, n), 1 / n), 0.6 * eye + 0.2 * swap + 0.2 * swap.T])


def outer(
    matrices,
    starts,
    updates,
    optimizer,
    every,
    inner="local",
    overlap=1,
    average="exact",
    parts=(slice(None),),
    delay=0,
    mix=0.0,
    pull=1.0,
):
    """An outer optimizer around local steps, D-PSGD, SGP or OSGP.

    Args:
      optimizer: as `sgd`, of the outer gradient at the anchor.
      average: "exact", "none", or matrices `[T, N, N]`, one per period of `every` steps.
      parts: the columns of each fragment; part f is sent (f + 1) / p through the period.
    """
    n = len(starts)
    x, w, messages = starts, np.ones(n), []
    is_exact = isinstance(average, str) and average == "exact"
    anchor = np.tile(starts.mean(axis=0), (n, 1)) if is_exact else starts.copy()
    states = [[{} for _ in range(n)] for _ in parts]
    sent = {}
    for k, u in enumerate(updates):
        x, w, messages = _inner_step(inner, matrices, k, x, w, u, messages, overlap)
        for f, part in enumerate(parts):
            if (k + 1 - (f + 1) * every // len(parts)) % every == 0:
                total = x.sum(axis=0) + sum(message[1].sum(axis=0) for message in messages)
                weight = w.sum() + sum(message[2].sum() for message in messages)
                nodes_average = np.tile(total / weight, (n, 1))
                z = nodes_average if is_exact else x / w[:, None]
                sent[k + delay] = f, part, z[:, part], k // every
        if k in sent:
            f, part, z, period = sent.pop(k)
            a = anchor[:, part]
            gradient = a - z
            if not isinstance(average, str):
                P = average[period % len(average)]
                gradient = P @ gradient + pull * (a - P @ a)
            change = [optimizer(states[f][i], period, gradient[i], a[i]) for i in range(n)]
            anchor = anchor.copy()
            anchor[:, part] = a + np.stack(change)
            models = x / w[:, None]
            models[:, part] = mix * models[:, part] + (1 - mix) * anchor[:, part]
            if is_exact and len(parts) == 1 and mix == 0:
                w, messages = np.ones(n), []
            x = models * w[:, None]
        yield x / w[:, None], x, w, anchor


def push_sum_outer(
    matrices,
    starts,
    updates,
    optimizer,
    every=1,
    is_tracked=True,
    is_damped=False,
    move=None,
):
    """Local steps from z to y; outer steps of the numerators x = w z: yields all of these.

    Args:
      optimizer: as `sgd`, of `D = z - y`, `[N, D]`: each number by itself.
      move: `(y, k) -> u`, instead of `updates`.
    """
    w = np.ones(len(starts))
    x = y = anchor = starts
    c = v = e = np.zeros_like(starts)
    state = {}
    for k, u in enumerate(updates):
        y = y + (u if move is None else move(y, k))
        if (k + 1) % every == 0:
            D = anchor - y
            u = optimizer(state, k, D, anchor)
            guard = np.minimum(1, w)[:, None] if is_damped else 1.0
            if is_tracked:
                v = v + guard * (u - v)
            else:
                v = guard * (e + u)
                e = e + u - v
            P = matrices[k // every % len(matrices)]
            t = v + c
            x, w = P @ (x + t), P @ w
            c = P @ t - v if is_tracked else c
            y = anchor = x / w[:, None]
        yield {"y": y, "x": x, "w": w, "anchor": anchor}


def _inner_step(inner, matrices, k, x, w, u, messages, overlap):
    P = matrices[k % len(matrices)]
    if inner == "local":
        return x + u, w, messages
    if inner == "dpsgd":
        return P @ x + u, w, messages
    if inner == "sgp":
        return P @ (x + u), P @ w, messages
    x = x + u
    if k % overlap == 0:
        P = matrices[k // overlap % len(matrices)]
        kept = np.diag(np.diag(P))
        messages = [*messages, (k + overlap, (P - kept) @ x, (P - kept) @ w)]
        x, w = kept @ x, kept @ w
    for step, numerators, weights in messages:
        if step == k:
            x, w = x + numerators, w + weights
    return x, w, [message for message in messages if message[0] != k]
