"""The events of asynchronous nodes in dense float64, by an implementation of its own.

It shares no code with `gossipjax.asynchronous`: it reads the lines of the journals.
"""

import json

import numpy as np


class OracleNode:
    def __init__(self):
        self.held = None  # x, m, w
        self.moved = self.momentum = 0.0
        self.outer = None
        self.process = None
        self.place = None


def replay(paths, start, gradient, rate, momentum):
    """Returns `(place, step) -> z`, at which that node took its gradient at that step."""
    lines = [[json.loads(t) for t in path.read_text().splitlines()] for path in paths]
    nodes = [OracleNode() for _ in paths]
    position = [0] * len(paths)
    sent, asked, answered, models = {}, {}, {}, {}

    def run(node, line):
        event, own, peer, number = (line[k] for k in ("event", "life", "peer", "number"))
        if event == "found":
            node.held = np.array([start, 0 * start, 1 + 0 * start])
        elif event == "join":
            node.held, node.moved = np.zeros((3, len(start))), 0.0
        elif event in ("share", "grant"):
            sent[own, peer, number] = node.held = node.held / 2
        elif event == "hand over":
            sent[own, peer, number], node.held = node.held, 0 * node.held
        elif event in ("receive", "return"):
            key = (peer, own, number) if event == "receive" else (own, peer, number)
            if key not in sent:
                return False
            node.held = node.held + sent[key]
        elif event == "ask":
            asked[own, peer, number] = node.held
        elif event == "average":
            if (peer, own, number) not in asked:
                return False
            answered[peer, own, number] = node.held
            node.held = node.held + (asked[peer, own, number] - node.held) / 2
        elif event == "averaged":
            if (own, peer, number) not in answered:
                return False
            node.held = node.held + (answered[own, peer, number] - asked[own, peer, number]) / 2
        elif event == "begin":
            z = node.held[0] / node.held[2] + node.moved
            models[node.place, number] = z
            node.momentum = gradient(z, node.place, number) + momentum * node.momentum
        elif event == "end":
            node.moved = node.moved - rate * node.momentum
            if node.outer is None:
                add_movement(node)
        elif event == "outer":
            x, m, w = node.held
            _, outer_rate, beta = node.outer
            m = beta * m - w * node.moved
            node.held = np.array([x + outer_rate * (w * node.moved - beta * m), m, w])
            node.moved = 0.0
        elif event == "finish":
            add_movement(node)
        else:
            assert event in ("admit", "decline", "declined"), event
        return True

    def add_movement(node):
        x, m, w = node.held
        node.held, node.moved = np.array([x + w * node.moved, m, w]), 0.0

    while any(at < len(events) for at, events in zip(position, lines, strict=True)):
        before = list(position)
        for i, events in enumerate(lines):
            while position[i] < len(events):
                line = events[position[i]]
                if line["event"] == "life":
                    if line["process"] != nodes[i].process:
                        nodes[i] = OracleNode()
                    nodes[i].process, nodes[i].place = line["process"], line["place"]
                    nodes[i].outer = line["outer"]
                elif not run(nodes[i], line):
                    break
                position[i] += 1
        assert position != before, "the journals lack an event"
    return models
