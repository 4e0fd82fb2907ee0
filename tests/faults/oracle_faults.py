"""Dense float64 oracles of methods under faults: plain NumPy, message by message.

They share no code with the package. Faults are `arrives(k, i, j)`, `delay(k, i, j)` and
`active(k, i)`; numerators and weights go together, as rows `[x, w]`.
"""

import numpy as np


def push_sum(matrices, starts, updates, arrives, delay, active, running_sums):
    """Yields `(z, held, in_flight, lost)` after every step; the last three are sums `[D + 1]`.

    With running sums it is the papers' form: absolute sums, and numbered messages.
    """
    n, d = starts.shape
    mass = np.concatenate([starts, np.ones((n, 1))], axis=1)
    sent = np.zeros((n, n, d + 1))  # by receiver and sender
    taken = np.zeros((n, n, d + 1))
    newest = np.full((n, n), -1)
    lost = np.zeros(d + 1)
    mail = []  # (step of arrival, step of sending, receiver, sender, content)
    for k, u in enumerate(updates):
        P = matrices[k % len(matrices)]
        mass[:, :d] += u
        before = mass.copy()
        for j in range(n):
            for i in range(n):
                if i == j or P[i, j] == 0 or not (active(k, i) and active(k, j)):
                    continue
                share = P[i, j] * before[j]
                mass[j] -= share
                if arrives(k, i, j) or running_sums:
                    sent[i, j] += share
                else:
                    lost = lost + share
                if arrives(k, i, j):
                    content = sent[i, j].copy() if running_sums else share
                    mail.append((k + delay(k, i, j), k, i, j, content))
        waiting = []
        for item in mail:
            due, number, i, j, content = item
            if due > k or not active(k, i):
                waiting.append(item)
            elif running_sums and number > newest[i, j]:
                newest[i, j] = number
                mass[i] += content - taken[i, j]
                taken[i, j] = content
            elif not running_sums:
                mass[i] += content
                taken[i, j] += content
        mail = waiting
        z = mass[:, :d] / mass[:, d:]
        yield z, mass.sum(axis=0), (sent - taken).sum(axis=(0, 1)), lost


def row_stochastic(matrices, x, updates, arrives, delay, active):
    """D-PSGD in which a receiver has its own model instead of one that does not come."""
    n = len(x)
    mail = []
    newest = np.full((n, n), -1)
    for k, u in enumerate(updates):
        P = matrices[k % len(matrices)]
        y = x + u
        for i in range(n):
            for j in range(n):
                is_sent = i != j and P[i, j] > 0 and active(k, i) and active(k, j)
                if is_sent and arrives(k, i, j):
                    mail.append((k + delay(k, i, j), k, i, j, y[j]))
        x = y.copy()
        for i in range(n):
            for j in range(n):
                now = [(number, m) for due, number, a, b, m in mail if (due, a, b) == (k, i, j)]
                if not now:
                    continue
                number, message = max(now, key=lambda pair: pair[0])
                if number > newest[i, j]:
                    newest[i, j] = number
                    if active(k, i):
                        x[i] += P[i, j] * (message - y[i])
        yield x
