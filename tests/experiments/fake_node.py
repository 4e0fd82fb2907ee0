"""An asynchronous node that takes no time: it writes its journal, and does not train.

A node that is started again begins a life without weight.
"""

import json
import os
import sys
import time
import uuid
from pathlib import Path

STEP_SECONDS = 0.02
STEPS = 200  # of a life


def main(out: Path, place: int, nodes: int) -> None:
    folder = out / "nodes" / "run" / "journals" / "0"
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / f"{place}.jsonl"
    is_first = not journal.exists()
    life = uuid.uuid4().hex
    with journal.open("a", buffering=1) as file:

        def write(event: str, **more: object) -> None:
            line = {"event": event, "life": life, "peer": life, "number": 0, "time": time.time()}
            file.write(json.dumps(line | more) + chr(10))

        write("life", place=place)
        write("found" if is_first else "join")
        for _ in range(STEPS):
            write("begin")
            time.sleep(STEP_SECONDS)
        write("ended")
    if place == 0:
        paths = [folder / f"{number}.jsonl" for number in range(nodes)]
        while not all('"ended"' in path.read_text() for path in paths):
            time.sleep(STEP_SECONDS)
        journals = [path.read_text() for path in paths]
        write_summary(out, [float('"join"' not in text) for text in journals])


def write_summary(out: Path, weights: list[float]) -> None:
    run = {"run": "a", "algorithm": "async-sgp", "topology": "exponential", "nodes": len(weights)}
    run |= {"seconds_per_step": STEP_SECONDS, "examples_per_second": 1.0, "steps": 200}
    run |= {"consensus_distance": 0.0, "test_accuracy_average_model": 0.9}
    run |= {"test_accuracy_nodes": [0.9] * len(weights), "weight_nodes": weights}
    run |= {"places_nodes": list(range(len(weights)))}
    summary = {"options": {}, "environment": {}, "runs": [run]}
    (out / "summary.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    out, nodes = (sys.argv[1 + sys.argv.index(name)] for name in ("--out", "--nodes"))
    main(Path(out), int(os.environ["GOSSIPJAX_NODE"]), int(nodes))
