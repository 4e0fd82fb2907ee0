"""A thousand nodes: what gossip costs against AllReduce, graph by graph, and what theory says."""

from experiments.report.section import Findings, Results, Scale, read_section
from experiments.runner import Run

BATCHES = {"per node": "per-node", "total": "total"}


def list_runs(scale: Scale) -> list[Run]:
    """Two calls for each way to choose batches; when quick, over up to 16 nodes."""
    images = ("--fashion-mnist", f"{scale.fashion_mnist}") if scale.fashion_mnist else ()
    if scale.is_quick:
        images = ("--nodes", "4", "16", "--steps", "64", "--seed", "0", "--total-batch-size", "128")
    runs = []
    for batch, name in BATCHES.items():
        exact = ("--batch", batch, "--method", "allreduce")
        every = (*exact, "outer", "dpsgd", "sgp")
        late = (*exact, "1-osgp", "sgp-every-H", "--graph", "ring", "one-peer", "base")
        runs.append(Run(f"scaling-{name}", "scaling", (*images, *every)))
        runs.append(Run(f"scaling-{name}-late", "scaling", (*images, *late)))
    return runs


def find(scale: Scale, results: Results) -> Findings:
    del scale, results
    return Findings([])


SECTION = read_section(name="scaling", list_runs=list_runs, find=find)
