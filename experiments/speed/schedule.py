"""What compiled train steps exchange, and beside which work: no accelerator is needed.

    python -m experiments.speed_schedule --target tpu
    python -m experiments.speed_schedule --target gpu

Compiles the train step of an MLP (gradients, SGD with Nesterov momentum, gossip; a program per
round, over a mesh with one node per chip) ahead of time, for chips that are not here, and reads
XLA's final schedule. `--target tpu` is 8 and 64 TPU v5e chips, `--target gpu` is 8 hosts with an
H100 each. Their compilers are to be installed in an environment each, for they do not mix:

    pip install "jax[tpu]==VERSION"
    pip install jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION \\
        nvidia-cuda-nvcc-cu12 nvidia-nvshmem-cu12

Per algorithm it reports every collective, beside what the schedule of the gossip says: as many
messages per step as there are peers, each of one type and of the size of the parameters and the
push-sum weight. `share` is that of the matrix products that are scheduled while a message is under
way, from the start of the first to the completion of the last. Nothing runs, so it tells the order
of the work, not its duration. For 8 TPU chips XLA starts a message at once. For 64, in the order in
which JAX lists them, it lets most permutations block; which ones depends on where the nodes lie.
For GPUs it starts a message as late as it reckons that the work that is left still hides it: the
share falls with a larger `--batch`, a narrower wire, or a message in pieces (`2-osgp`).

`metrics.jsonl` has a line per compiled program, `summary.json` the rows of the table in `runs`. The
exit status is 1 if a count or a size is another one than the schedule's.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import gossipjax as gx
from experiments import results
from experiments.methods import Method, Setting, method
from experiments.schedule_targets import Kind, Target, chosen, devices
from experiments.schedule_text import Compiled, Message, read

Wire = Literal["full", "bfloat16"]
Record = dict[str, Any]

CASES: tuple[tuple[str, Wire], ...] = (
    ("allreduce", "full"),
    ("dpsgd@ring", "full"),
    ("dpsgd@bipartite_exponential", "full"),
    ("sgp", "full"),
    ("sgp@two_peer_exponential", "full"),
    ("sgp", "bfloat16"),
    ("1-osgp", "full"),
    ("2-osgp", "full"),
    ("1-osgp", "bfloat16"),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the compiled schedules."""

    target: tuple[Kind, ...] = ()
    """Chips to compile for; all whose compiler is installed if not given."""
    layers: int = 20
    """Layers of the MLP."""
    width: int = 512
    """Inputs and outputs of a layer."""
    batch: int = 128
    """Examples per node and step."""
    every_round: bool = False
    """Compile the program of every distinct round; else that of one per algorithm."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "batch"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name} is at least 1, not {value}.")


class Model(NamedTuple):
    """An MLP of `layers` matrices `[width, width]` and biases, on `batch` examples per node."""

    layers: int
    width: int
    batch: int

    @property
    def params(self) -> list[dict[str, jax.ShapeDtypeStruct]]:
        """Of one node."""
        layer = {"w": (self.width, self.width), "b": (self.width,)}
        return [
            {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in layer.items()}
            for _ in range(self.layers)
        ]

    @property
    def examples(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Inputs and targets of one node."""
        shape = jax.ShapeDtypeStruct((self.batch, self.width), jnp.float32)
        return {"x": shape, "y": shape}

    @property
    def size(self) -> int:
        """The number of parameters."""
        return self.layers * self.width * (self.width + 1)

    @staticmethod
    def loss(params: Any, examples: Any) -> jax.Array:
        """The mean squared error."""
        x = examples["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - examples["y"]) ** 2)


def compiled(how: Method, model: Model, mesh: Mesh, step: int) -> Compiled:
    """The train step's final schedule, for the round of the static step number `step`."""
    tx = how.transform

    def train_step(params: Any, state: Any, examples: Any, step: int) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(model.loss)(params, examples)
        updates, state = tx.update(grads, state, params, step=step)
        return optax.apply_updates(params, updates), state, loss

    sharding = NamedSharding(mesh, P("nodes"))

    def stacked(tree: Any) -> Any:
        def stack(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=sharding)

        return jax.tree.map(stack, tree)

    state = jax.eval_shape(tx.init, model.params)
    program = gx.spmd(train_step, mesh=mesh, static_argnums=3, donate_argnums=(0, 1))
    lowered = program.lower(stacked(model.params), stacked(state), stacked(model.examples), step)
    return read(lowered.compile().as_text())


def expected(how: Method, wire: Wire, parameters: int, step: int) -> list[Message]:
    """The messages of a node in this step, as the mixing matrix says."""
    if how.algorithm == "allreduce":
        return [Message("all-reduce", "f32", 4 * parameters)]
    overlap = how.lookback
    sent_at = (step - 1) // overlap * overlap if overlap else step  # the round of what travels now
    peers = np.count_nonzero(how.schedule.round_at(sent_at).matrix, axis=0).max() - 1
    values = parameters + (how.algorithm != "dpsgd")  # the push-sum weight
    values = -(-values // max(1, overlap))  # a message travels in so many pieces
    if wire == "full":
        return [Message("collective-permute", "f32", 4 * values)] * peers
    # The weight travels in full width, as two words; overlapped, beside its place in the message.
    words = values + (2 if overlap else 1)
    return [Message("collective-permute", "u16", 2 * words)] * peers


def measure(name: str, wire: Wire, target: Target, options: Options, mesh: Mesh) -> list[Record]:
    """One algorithm's programs: the lines of `metrics.jsonl`."""
    dtype = jnp.bfloat16 if wire == "bfloat16" else None
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
    how = method(name, Setting(nodes=target.nodes, wire_dtype=dtype), optimizer)
    model = Model(options.layers, options.width, options.batch)
    steps = how.schedule.canonical_steps(how.lookback)
    records = []
    for step in steps if options.every_round else steps[-1:]:
        program = compiled(how, model, mesh, step)
        said = expected(how, wire, model.size, step)
        records.append(
            {
                "target": target.words,
                "algorithm": how.algorithm,
                "topology": how.topology,
                "wire": wire,
                "step": step,
                "parameters": model.size,
                "messages": [m._asdict() for m in program.messages],
                "messages_of_the_schedule": [m._asdict() for m in said],
                "as_the_schedule_says": sorted(program.messages) == sorted(said),
                "matrix_products": program.products,
                "matrix_products_before_the_start": program.before,
                "matrix_products_in_between": program.between,
            }
        )
    return records


def summarized(programs: list[Record]) -> Record:
    """The object in `runs` of `summary.json`: what is common, and the worst of the programs."""
    worst = min(programs, key=lambda p: p["matrix_products_in_between"])
    agree = all(p["as_the_schedule_says"] for p in programs)
    wrong = next((p for p in programs if not p["as_the_schedule_says"]), worst)
    share = worst["matrix_products_in_between"] / max(1, worst["matrix_products"])
    return {
        **{k: v for k, v in worst.items() if k != "step"},
        "programs": len(programs),
        "messages": wrong["messages"],
        "messages_of_the_schedule": wrong["messages_of_the_schedule"],
        "as_the_schedule_says": agree,
        "share_of_matrix_products_in_between": share,
    }


def _listed(messages: list[Record]) -> str:
    kinds = {(m["opcode"], m["dtype"], m["bytes"]): 0 for m in messages}
    for m in messages:
        kinds[m["opcode"], m["dtype"], m["bytes"]] += 1
    lines = [f"{count} {op} {dtype} {size:,}" for (op, dtype, size), count in kinds.items()]
    return "\n".join(lines) or "none"


def table(runs: list[Record]) -> Table:
    """The list `runs` of `summary.json`."""
    result = Table(
        title="Collectives of a compiled step, and matrix products between start and done",
        caption="collectives: of one node: count, kind, type and bytes of each",
        box=SIMPLE_HEAD,
        padding=0,
    )
    for header in ("target", "algorithm", "topology", "collectives", "schedule"):
        result.add_column(header, overflow="fold")
    for header in ("programs", "products", "share"):
        result.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        same = run["as_the_schedule_says"]
        result.add_row(
            run["target"],
            run["algorithm"] + (f", {run['wire']}" if run["wire"] != "full" else ""),
            run["topology"].replace("_", " "),
            _listed(run["messages"]),
            "the same" if same else f"DIFFERS: {_listed(run['messages_of_the_schedule'])}",
            f"{run['programs']}",
            f"{run['matrix_products_in_between']} of {run['matrix_products']}",
            f"{run['share_of_matrix_products_in_between']:.0%}",
        )
    return result


def main(options: Options) -> None:
    """What compiled steps exchange, and beside which work; for TPUs and GPUs that are not here."""
    try:
        targets = chosen(options.target)
        out = results.claim_folder("speed-schedule", options.out, options.overwrite)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    console, programs, runs = Console(), [], []
    console.print(f"{', '.join(t.words for t in targets)}. Results: {out}", soft_wrap=True)
    try:
        with (out / "metrics.jsonl").open("w") as file, results.progress_bar(console) as bar:
            task = bar.add_task("compiling", total=len(targets) * len(CASES), status="")
            for target in targets:
                mesh = Mesh(np.array(devices(target)), ("nodes",))
                for name, wire in CASES:
                    bar.update(task, status=f"{name}, {wire} wire, {target.words}")
                    programs = measure(name, wire, target, options, mesh)
                    file.writelines(f"{json.dumps(p)}\n" for p in programs)
                    file.flush()
                    runs.append(summarized(programs))
                    bar.advance(task)
            bar.update(task, status=f"{len(runs)} rows")
    except KeyboardInterrupt:
        print(f"interrupted; {out} holds what was compiled", file=sys.stderr)
        sys.exit(130)
    results.write_summary(out, dataclasses.asdict(options), {}, runs)
    console.print(table(runs))
    if not all(run["as_the_schedule_says"] for run in runs):
        sys.exit("error: a program exchanges something else than its schedule says; see the table.")


if __name__ == "__main__":
    main(
        tyro.cli(tyro.conf.FlagCreatePairsOff[Options], prog="python -m experiments.speed_schedule")
    )
