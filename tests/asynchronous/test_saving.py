"""What a node saves of itself, and what the job has of it when nodes come back."""

import contextlib
import signal
import socket
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gossipjax.asynchronous as ga
from gossipjax.checkpoint import Preempted

PATIENCE = 1.0
TX = optax.adamw(optax.linear_schedule(0.1, 0.01, 100))
GOALS = (1.0, 3.0)


def gradients(params, goal):
    return jax.tree.map(lambda x: x - goal, params), None


def free_addresses(count):
    with contextlib.ExitStack() as stack:
        made = (socket.create_server(("127.0.0.1", 0)) for _ in range(count))
        servers = [stack.enter_context(server) for server in made]
        return [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]


class Job:
    """Two nodes in this process that know each other's addresses."""

    def __init__(self, folder):
        self.folder = folder
        self.lives = 0
        self.addresses = free_addresses(2)
        self.nodes: Any = ()
        self.saved: Any = ()

    @property
    def journals(self):
        return sorted(self.folder.glob("*.jsonl"))

    def start(self, place, saves="saved", patience=PATIENCE):
        self.lives += 1
        return ga.join(
            TX,
            {"w": jnp.zeros(3)},
            algorithm=ga.outer(every=5),
            address=[self.addresses[1 - place]],
            listen=self.addresses[place],
            place=place,
            is_founder=self.lives <= 2 or None,
            patience=patience,
            journal=self.folder / f"{place}.jsonl",
            folder=self.folder / saves,
            every=4,
        )

    def train(self, nodes, steps):
        for _ in range(steps):
            for node in nodes:
                node.step(gradients, GOALS[node.place])

    def kill(self, *nodes):
        """As SIGKILL: the system closes sockets and frees locks."""
        for node in nodes:
            node._service.close()
            node._saves.checkpoints.close()
            node._journal.close()

    def require_account(self, *living):
        assert all(node._journal.has_written(10) for node in living)  # a thread writes it
        account = ga.account(self.journals)
        assert abs(account.difference) < 1e-9
        return account


@pytest.fixture(autouse=True)
def promotion_that_optax_needs():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    nodes = job.start(0), job.start(1)
    job.train(nodes, 23)  # the saves are from step 20
    job.saved = [read_save(node) for node in nodes]
    job.nodes = nodes
    return job


def read_save(node):
    like = (np.zeros(3, np.float32),) * 2, TX.init({"w": jnp.zeros(3)})
    return node._saves.checkpoints.restore(like).state


def require_saved(job, node):
    """It holds its saved model and momentum."""
    x, _ = job.saved[node.place]
    held = node._holding.read()
    for found, saved in ((node.params["w"], x[0]), (held.x[1] / held.w, x[1])):
        np.testing.assert_array_equal(found, saved)
    assert np.any(x[1] != 0)
    require_optimizer(job, node)
    assert node.steps == 20


def require_optimizer(job, node):
    jax.tree.map(np.testing.assert_array_equal, node.opt_state, job.saved[node.place][1])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_all_die_and_one_comes_back_after_the_other(job, order):
    job.kill(*job.nodes)
    first = job.start(order[0])
    first.wait_for_mass()
    require_saved(job, first)
    second = job.start(order[1], patience=20.0)  # it hears the first, on a busy machine, too
    second.wait_for_mass()
    np.testing.assert_array_equal(second.params["w"], first.params["w"])
    require_optimizer(job, second)
    assert job.require_account(first, second).founded == 3
    assert first.statistics.weight + second.statistics.weight == 1
    with pytest.warns(UserWarning, match="so this one goes on alone from what it had saved"):
        job.train([first, second], 20)
    assert first.total_steps == second.total_steps >= 60
    job.require_account()
    second.leave()
    first.leave()
    job.require_account()


def test_all_die_and_come_back_together(job):
    job.kill(*job.nodes)
    # So that the second has begun before the first is out of patience, on a busy machine, too.
    nodes = job.start(0, patience=6.0), job.start(1, patience=6.0)
    for node in nodes:
        node.wait_for_mass()
    for node in nodes:
        require_saved(job, node)
    assert job.require_account(*nodes).founded == 4
    job.train(nodes, 10)
    for node in nodes:
        node.leave()
    job.require_account()


def test_one_with_an_empty_folder_waits_for_the_one_that_has_the_model(job):
    job.kill(*job.nodes)
    empty = job.start(1, "empty")
    with pytest.raises(TimeoutError, match="nobody listens at"):
        empty.wait_for_mass(3 * PATIENCE)
    saved = job.start(0)
    saved.wait_for_mass()
    require_saved(job, saved)
    empty.wait_for_mass()
    np.testing.assert_array_equal(empty.params["w"], saved.params["w"])
    assert empty.statistics.weight + saved.statistics.weight == 1
    empty.leave()
    saved.leave()
    job.require_account()


def test_a_killed_node_has_its_optimizer_back_while_the_other_lives(job):
    """Its schedules go on where those of the other are, and its model is half of the other's."""
    job.kill(job.nodes[1])
    a = job.nodes[0]
    while a.members != [0]:  # then what it sent is back
        time.sleep(0.1)
    with pytest.warns(UserWarning, match="no other node was heard for 1 s, so this one goes on"):
        job.train([a], 32)  # to an outer step
    with job.start(1, patience=20.0) as b:  # it hears the other, on a busy machine, too
        b.wait_for_mass()
        np.testing.assert_allclose(b.params["w"], a.params["w"])
        b.step(gradients, 3.0)
        counts = {
            path[-1].tuple_name: int(count)
            for path, count in optax.tree.get_all_with_path(b.opt_state, "count")
        }
        assert counts == {"ScaleByAdamState": 21, "ScaleByScheduleState": 56}
        assert 21 <= b.steps <= 24  # as far as the other had heard
        assert job.require_account().founded == 2
    a.leave()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_what_is_saved_at_a_signal(name, tmp_path, capsys):
    """And said; of two nodes the first hands over what it holds."""
    job = Job(tmp_path)
    nodes = job.start(0), job.start(1)
    while nodes[1].members != [0, 1]:
        time.sleep(0.01)

    def end(node):
        with node:
            job.train([node], 7)
            signal.raise_signal(signal.Signals[name])
            job.train([node], 7)

    for place, mass in ((1, "hands its model and weight to"), (0, "leaves nothing to")):
        with pytest.raises(Preempted, match="saved after step 8"):
            end(nodes[place])
        says = f"gossipjax: asked to end: node {place} has saved step 8, {mass} another node."
        assert capsys.readouterr().err == f"{says}\n"
    again = job.start(0)
    assert again.steps == 8
    again.leave()
