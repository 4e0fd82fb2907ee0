"""Checkpoints: bit for bit, beside the run, and nothing lost when one is damaged or not written."""

import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from modes import mesh, run
from test_resume import GOSSIP, chain

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints
from gossipjax.leaves import checksum
from gossipjax.resume import change_nodes

ROOT = Path(__file__).parent.parent
N, STEPS = 8, 13
WHERE = {"mesh": {"mesh": mesh(N)}, "vmap": {"nodes": N}}


def placed(x, where):
    return jax.device_put(x, NamedSharding(mesh(N), P("nodes"))) if "mesh" in where else x


def like(state):
    """Shapes and shardings; what is not JAX's, as it is."""
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        state,
    )


def assert_equal_to_the_bit(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("kind", WHERE)
@pytest.mark.parametrize("name", GOSSIP)
def test_a_run_taken_up_again_is_the_run_that_was_never_interrupted(name, kind, tmp_path):
    where, tx = WHERE[kind], chain(name, N)

    def step(params, state, key, k):
        key, now = jax.random.split(key)
        grads = jax.tree.map(lambda z: z - jax.random.normal(now, z.shape, z.dtype), params)
        updates, state = tx.update(grads, state, params, step=k)
        return optax.apply_updates(params, updates), state, key

    program = run("shard_map" if kind == "mesh" else "vmap", step, N, shared=(3,))
    narrow = jnp.bfloat16 if kind == "vmap" else jnp.float32
    params = {"a": jnp.ones((N, 3, 2)), "b": jnp.arange(N * 5, dtype=narrow).reshape(N, 5)}
    params, key = placed((params, jax.random.split(jax.random.key(1), N)), where)
    now = (params, gx.spmd(tx.init, **where)(params), key)
    wanted, seed = like(now), sum(map(ord, name))
    chosen = np.random.default_rng(seed).choice(np.arange(1, STEPS), 3, replace=False).tolist()
    with Checkpoints(tmp_path) as checkpoints:
        for k in range(STEPS):
            if k in chosen:
                checkpoints.save(k, now, {"k": k})
            now = program(*now, jnp.int32(k))
        for k in chosen:
            restored = checkpoints.restore(wanted, k)
            assert restored is not None
            assert restored.place == {"k": k}
            again: Any = restored.state
            for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(wanted), strict=True):
                assert a.sharding == b.sharding
            for j in range(k, STEPS):
                again = program(*again, jnp.int32(j))
            assert_equal_to_the_bit(again, now)


def test_what_is_saved_may_be_donated(tmp_path):
    """The next step takes the memory of the state before all of it is written."""
    program = gx.spmd(lambda x: -2 * x, **WHERE["mesh"], donate_argnums=0)
    now = placed(jnp.ones((N, 200_000)), WHERE["mesh"])
    with Checkpoints(tmp_path, keep=4) as checkpoints:
        for k in range(4):
            checkpoints.save(k, now, {})
            now = program(program(now))
        for k in range(4):
            found = checkpoints.restore(like(now), k)
            assert found is not None
            assert (found.state == 4**k).all()


def small(value=1, nodes=N):
    """One of everything."""
    return {
        "weights": placed(
            jnp.full((nodes, 40, 50), value, jnp.float32), {"mesh"} if nodes == N else ()
        ),
        "narrow": jnp.full((nodes, 3), value, jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(value), nodes),
        "none": jnp.zeros((nodes, 0)),
        "host": np.arange(3) + value,
        "wide": np.full(2, value + 1e-12),
        "flags": np.array([True, False]),
        "epoch": value,
        "rate": value / 3,
    }


def assert_same(found, wanted):
    for name, leaf in wanted.items():
        assert type(found[name]) is type(leaf)
        assert getattr(found[name], "sharding", None) == getattr(leaf, "sharding", None)
    arrays = [{k: v for k, v in s.items() if k not in ("epoch", "rate")} for s in (found, wanted)]
    assert_equal_to_the_bit(*arrays)
    assert (found["epoch"], found["rate"]) == (wanted["epoch"], wanted["rate"])


def complete(folder):
    return sorted(path.name for path in folder.iterdir())


def test_keeps_the_last_ones_and_restores_the_newest(tmp_path):
    folder = tmp_path / "new" / "folder"
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.restore(small()) is None
        for step in (5, 10, 15):
            checkpoints.save(step, small(step), {"seen": [step]})
        assert checkpoints.wait() == [10, 15]
        checkpoints.save(15, small(99), {})  # is there already
    with Checkpoints(folder) as checkpoints:
        step, state, place = checkpoints.restore(small()) or (None, None, None)
        assert (step, place) == (15, {"seen": [15]})
        assert_same(state, small(15))
        older = checkpoints.restore(small(), step=10)
        assert older is not None
        assert_same(older.state, small(10))
        with pytest.raises(ValueError, match=r"no checkpoint of step 11; it has \[10, 15\]"):
            checkpoints.restore(small(), step=11)
    assert complete(folder) == ["10", "15"]


def test_arrays_of_the_host_may_be_changed_at_once(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        array = np.zeros(200_000)
        checkpoints.save(1, {"a": array}, {})
        array += 1
        restored = checkpoints.restore({"a": array})
    assert restored is not None
    assert not restored.state["a"].any()


def test_a_run_from_an_older_checkpoint_supersedes_the_newer_ones(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, small(step), {})
        checkpoints.restore(small(), step=1)
        checkpoints.save(2, small(22), {})
        checkpoints.save(3, small(33), {})
        assert checkpoints.wait() == [1, 2, 3]
        found = checkpoints.restore(small(), step=2)
        assert found is not None
        assert_same(found.state, small(22))
    assert complete(tmp_path) == ["1", "2", "2.superseded", "3", "3.superseded"]


def test_what_is_not_finished_is_not_a_checkpoint(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(1), {})
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")  # as a kill leaves it
    with Checkpoints(tmp_path) as checkpoints:
        assert complete(tmp_path) == ["1"]
        assert checkpoints.wait() == [1]


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)


# What orbax began to read when it failed goes on for a moment, and complains of a closed loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["deleted", "truncated", "one bit"])
@pytest.mark.parametrize("which", ["arrays", "description", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(which, how, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, small(step), {"step": step})
    path = {
        "arrays": max((tmp_path / "2").rglob("d/*"), key=lambda path: path.stat().st_size),
        "description": tmp_path / "2" / "about" / "metadata",
        "manifest": tmp_path / "2" / "state" / "manifest.ocdbt",
    }[which]
    damage(path, how)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(UserWarning, match=r"step 2 .* is damaged .* took that of step 1"):
            step, state, place = checkpoints.restore(small()) or (None, None, None)
        assert (step, place) == (1, {"step": 1})
        assert_same(state, small(1))
        checkpoints.save(2, small(4), {})  # the run comes there again
        step, state, _ = checkpoints.restore(small()) or (None, None, None)
        assert step == 2
        assert_same(state, small(4))
    assert complete(tmp_path) == ["1", "2", "2.corrupted"]


def test_all_damaged(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, small(step), {})
            checkpoints.wait()
            damage(tmp_path / str(step) / "about" / "metadata", "truncated")
        with pytest.raises(OSError, match=r"can be read \(step 2: .*; step 1: "):
            checkpoints.restore(small())
        assert checkpoints.wait() == [1, 2]


class TestAnotherState:
    def restore(self, folder, saved, wanted):
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(4, saved, {})
            checkpoints.wait()
            damage(max(folder.rglob("d/*"), key=lambda path: path.stat().st_size), "deleted")
            checkpoints.restore(wanted)  # says so before it looks at an array

    def test_another_shape(self, tmp_path):
        ones = {"a": jnp.ones((8, 2)), "b": jnp.ones((8, 3))}
        message = (
            r"step 4 has \['b'\]: \[8, 3\] float32, where this run has \['b'\]: \[8, 2\] float32"
        )
        with pytest.raises(ValueError, match=message):
            self.restore(tmp_path, ones, ones | {"b": jnp.ones((8, 2))})

    def test_another_type(self, tmp_path):
        with pytest.raises(ValueError, match=r"\[8\] float32, where .* \[8\] bfloat16.*of another"):
            self.restore(tmp_path, jnp.ones(8), jnp.ones(8, jnp.bfloat16))

    def test_another_model(self, tmp_path):
        with pytest.raises(ValueError, match=r"\['a'\]: \[8\] float32, where .* \['b'\]: \[8\]"):
            self.restore(tmp_path, {"a": jnp.ones(8)}, {"b": jnp.ones(8)})

    @pytest.mark.parametrize("more", ["saved", "wanted"])
    def test_more_arrays(self, tmp_path, more):
        one, two = (jnp.ones(8),), (jnp.ones(8),) * 2
        with pytest.raises(ValueError, match="nothing more"):
            self.restore(tmp_path, two if more == "saved" else one, one if more == "saved" else two)

    def test_another_number_of_nodes(self, tmp_path):
        with pytest.raises(ValueError, match=r"\[8, 2\].* \[5, 2\].*resume.change_nodes"):
            self.restore(tmp_path, jnp.ones((8, 2)), jnp.ones((5, 2)))


def test_read_as_it_was_saved_and_taken_up_by_another_number_of_nodes(tmp_path):
    """What a program does: `place` says of how many nodes the state is."""

    def start(nodes):
        params = jnp.ones((nodes, 4))
        return params, gx.spmd(chain("osgp 1", nodes).init, nodes=nodes)(params)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(6, start(8), {"nodes": 8})
        found = checkpoints.restore(lambda place: jax.eval_shape(lambda: start(place["nodes"])))
    assert found is not None
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found.state))
    params, state = found.state
    _, _, report = change_nodes(params, state, chain("osgp 1", 5), 5)
    assert (report.before, report.after) == (found.place["nodes"], 5)


@pytest.mark.filterwarnings("default:.*could not be written")
def test_no_space_left_harms_nothing(tmp_path):
    """A limit on the size of files is met in the thread that writes, as a full disk is."""
    noise = {"a": jnp.asarray(np.random.default_rng(0).normal(size=(8, 50_000)))}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, noise, {})
        checkpoints.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            checkpoints.save(2, noise, {})
            with pytest.warns(UserWarning, match=r"step 2 could not be written .* the run goes on"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert complete(tmp_path) == ["1"]
        assert checkpoints.restore(noise) is not None
        checkpoints.save(3, noise, {})
        assert checkpoints.wait() == [3]
    assert complete(tmp_path) == ["3"]


class TestFolder:
    def test_is_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "folder"):
            with pytest.raises(OSError, match=f"cannot be written to {path}: "):
                Checkpoints(path)

    def test_cannot_be_written(self, tmp_path, monkeypatch):
        def refused(*args, **kwargs):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "touch", refused)  # root may write everywhere
        with pytest.raises(OSError, match="Permission denied"):
            Checkpoints(tmp_path)

    def test_keep_nothing(self, tmp_path):
        with pytest.raises(ValueError, match="at least 1; got 0"):
            Checkpoints(tmp_path, keep=0)

    def test_a_place_that_is_no_json(self, tmp_path):
        with (
            Checkpoints(tmp_path) as checkpoints,
            pytest.raises(TypeError, match="not JSON serializable"),
        ):
            checkpoints.save(1, small(), {"place": jnp.ones(2)})


def test_the_checksum_sees_any_word_and_is_the_same_everywhere():
    x = np.random.default_rng(0).normal(size=(8, 30)).astype(np.float32)
    expected = int((x.view(np.uint32).astype(object).ravel() * (2 * np.arange(240) + 1)).sum())
    assert checksum([x]) == checksum([jnp.asarray(x)]) == expected % 2**32
    assert checksum([placed(jnp.asarray(x), WHERE["mesh"])]) == checksum([x])
    for i in (0, 17, 239):
        y = x.copy()
        y.ravel()[i] = -y.ravel()[i]
        assert checksum([y]) != checksum([x])
    assert checksum([x, x + 1]) != checksum([x + 1, x])
    with jax.enable_x64():
        wide = x.astype(np.float64)
        assert checksum([wide]) == checksum([jnp.asarray(wide)])


def test_without_orbax():
    code = (
        "import sys; sys.modules['orbax'] = None\n"
        "import gossipjax, gossipjax.resume\n"
        "try: import gossipjax.checkpoint\n"
        "except ImportError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert 'needs orbax: pip install "gossipjax[checkpoint]"' in said.stdout, said.stderr


WORKER = """
import sys, warnings
rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
import jax.numpy as jnp, numpy as np, optax, gossipjax as gx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pathlib import Path
from gossipjax.checkpoint import Checkpoints

def agree():
    jax.block_until_ready(jax.jit(jnp.sum)(z))

mesh = Mesh(np.array(jax.devices()), ("nodes",))
tx = optax.chain(optax.sgd(0.1, momentum=0.9), gx.osgp(gx.topology.ring(4)))
start = np.random.default_rng(0).normal(size=(4, 1000)).astype(np.float32)
z = jax.device_put(start, NamedSharding(mesh, P("nodes")))
state = gx.spmd(tx.init, mesh=mesh)(z)
def update(z, s, k):
    u, s = tx.update(z, s, z, step=k)
    return z + u, s
step = gx.spmd(update, mesh=mesh, shared_argnums=2, donate_argnums=(0, 1))
def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
def mine(tree):
    return [np.asarray(s.data) for x in jax.tree.leaves(tree) for s in x.addressable_shards]
wanted = like((z, state))
with Checkpoints(folder) as checkpoints:
    for k in range(6):
        if k in (2, 4):
            checkpoints.save(k, (z, state), {"k": k})
        z, state = step(z, state, np.int32(k))
    assert checkpoints.wait() == [2, 4]
    end = mine((z, state))
    for _ in range(2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            k, again, place = checkpoints.restore(wanted)
        assert place == {"k": k}
        print("restored", k, len(said), flush=True)
        for j in range(k, 6):
            again = step(*again, np.int32(j))
        for a, b in zip(mine(again), end, strict=True):
            np.testing.assert_array_equal(a, b)
        agree()
        if rank == 1 and k == 4:  # the arrays that this process alone has written
            for path in Path(folder, "4").rglob("ocdbt.process_1/d/*"):
                path.write_bytes(b"")
        agree()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wanted)
    whole = checkpoints.restore(shapes)
    assert whole.state[0].shape == (4, 1000)
"""


def test_two_processes_write_what_each_has_and_agree_on_what_is_damaged(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-c", WORKER]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(port), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            out, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors[-3000:]
            assert "restored 4 0\nrestored 2 1\n" in out
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert complete(tmp_path) == ["2", "4.corrupted"]
