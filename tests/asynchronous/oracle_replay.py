"""The events of asynchronous nodes in dense float64, by an implementation of its own.

It shares no code with `gossipjax.asynchronous`: it reads the lines of the journals.
"""

import json

import numpy as np


class OracleNode:
    def __init__(self):
        self.x = self.w = self.count = None
        self.momentum = 0.0
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
            node.x, node.w, node.count = np.array(start, float), 1.0, 1.0
        elif event == "join":
            node.x, node.w, node.count = np.zeros_like(start, float), 0.0, 0.0
        elif event == "admit":
            node.count += 1
        elif event in ("share", "grant"):
            sent[own, peer, number] = (node.x / 2, node.w / 2, node.count / 2)
            node.x, node.w, node.count = sent[own, peer, number]
        elif event == "hand over":
            sent[own, peer, number] = (node.x, node.w, node.count)
            node.x, node.w, node.count = 0 * node.x, 0.0, 0.0
        elif event in ("receive", "return"):
            key = (peer, own, number) if event == "receive" else (own, peer, number)
            if key not in sent:
                return False
            x, w, count = sent[key]
            node.x, node.w, node.count = node.x + x, node.w + w, node.count + count
        elif event == "ask":
            asked[own, peer, number] = (node.x, node.w, node.count)
        elif event in ("average", "averaged"):
            here = (node.x, node.w, node.count)
            if event == "average":
                if (peer, own, number) not in asked:
                    return False
                mine, other = here, asked[peer, own, number]
                answered[peer, own, number] = mine
            else:
                if (own, peer, number) not in answered:
                    return False
                mine, other = asked[own, peer, number], answered[own, peer, number]
            node.x, node.w, node.count = (
                h + (o - m) / 2 for h, o, m in zip(here, other, mine, strict=True)
            )
        elif event == "begin":
            z = node.x / node.w
            models[node.place, number] = z
            node.momentum = gradient(z, node.place, number) + momentum * node.momentum
        elif event == "end":
            node.x = node.x - rate * node.momentum * node.w / max(node.count, 2 / 3)
        else:
            assert event in ("decline", "declined"), event
        return True

    while any(at < len(events) for at, events in zip(position, lines, strict=True)):
        before = list(position)
        for i, events in enumerate(lines):
            while position[i] < len(events):
                line = events[position[i]]
                if line["event"] == "life":
                    if line["process"] != nodes[i].process:
                        nodes[i] = OracleNode()
                    nodes[i].process, nodes[i].place = line["process"], line["place"]
                elif not run(nodes[i], line):
                    break
                position[i] += 1
        assert position != before, "the journals lack an event"
    return models
