"""One of several machines that wait for nobody: python asynchronous.py STEPS"""

import sys
import time

import jax
import optax
import training
from safetensors.flax import save_file

import gossipjax as gx

gradients = jax.grad(training.loss_fn, has_aux=True)
evaluate = jax.jit(training.loss_fn)
with gx.asynchronous.join(
    optax.adam(1e-3),
    training.make_params(),
    algorithm=gx.asynchronous.outer(every=50),
    folder="saved",
    node_weight=training.EXAMPLES,
) as node:
    held_out = training.read_held_out(node.place)
    print(f"node {node.place} begins at step {node.steps}")
    clock = time.time()
    while node.total_steps < int(sys.argv[1]):  # of all nodes together
        loss = node.step(gradients, training.read_rows(node.place, node.steps))
        if node.steps % 100 == 0:
            speed = f"{100 * training.TOKENS / (time.time() - clock):,.0f} tokens/s"
            own = evaluate(node.params, held_out)[1]
            held = f"held out {own:.3f} here, {node.mean(own):.3f} on all"
            losses = f"loss {loss:.3f}, {held}"
            print(f"step {node.steps} {losses}, {speed}, nodes {node.members}")
            clock = time.time()
    print(f"waits for all nodes to end, hears {node.members}")
    model = node.average()
    own = evaluate(model, held_out)[1]
    print(f"average model: held out {own:.3f} here, {node.mean(own):.3f} on all")
leaves = jax.tree_util.tree_leaves_with_path(model)
names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
arrays = dict(zip(names, jax.tree.leaves(model), strict=True))
save_file(arrays, "model.safetensors")
