"""What arrives from strangers: it is dropped, counted and named, and nobody stops."""

import copy
import json
import math
import random
import socket

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zmq
from real_nodes import SECRET, gradients, join, wait_for

import gossipjax as gx
import gossipjax.asynchronous as ga
from gossipjax.asynchronous._messages import (
    KINDS,
    Format,
    Identity,
    Mass,
    Message,
    MessageError,
    View,
    Words,
    decode,
    encode,
)
from gossipjax.asynchronous._sockets import make_keys

MUTATED = 600
FLOAT32, FLOAT64 = np.dtype("float32"), np.dtype("float64")
FORM = Format({"job": "job"}, ((gx.wire.bfloat16(), 3, FLOAT32), (None, 2, FLOAT64)))
SENDER = Identity(3, "life", "127.0.0.1:5000")
X = (np.array([1.0, 2.0, -3.0], np.float32), np.array([0.5, 4.0]))
MASS = Mass(X, 0.5, -700)


def make_narrow(x, w=0.5, exponent=0):
    """A mass of which the first buffer is in the form of the wire."""
    codec = gx.wire.bfloat16()
    words = np.asarray(codec.encode(jnp.asarray(x[0])))
    return Mass((Words(words, codec, 3, FLOAT32), x[1]), w, exponent)


SHARE = Message("share", SENDER, "other", 7, make_narrow(X, exponent=-700), is_narrow=True)
OWN_VIEW = View(
    (SENDER,),
    (9,),
    ((SENDER, "dead", 2.5),),
    ((3, 12),),
    (("life", 1),),
    *(True, False, True, True, False, True, False),
    *(5, 3, 4),
)
VIEW = Message("view", SENDER, None, view=OWN_VIEW)
VIEW_FIELDS = OWN_VIEW._asdict()


def encoded(message, **changes):
    """The frames of a message whose header is changed."""
    frames = [bytes(frame) for frame in encode(message, FORM)]
    header = json.loads(frames[0]) | changes
    return [json.dumps(header).encode(), *frames[1:]]


@pytest.mark.parametrize(
    "message",
    [
        SHARE,
        VIEW,
        SHARE._replace(is_narrow=False, mass=MASS),
        Message("ask", SENDER, "other", 1, MASS),
        Message("final", SENDER, "other", 2, MASS, origin=SENDER, version=3),
        Message("refuse", SENDER, "other", 2, text="with NaN"),
    ],
)
def test_messages_are_read_as_they_were_written(message):
    found = decode(encode(message, FORM), FORM)
    assert found._replace(mass=None) == message._replace(mass=None)
    assert (found.mass is None) == (message.mass is None)
    if found.mass is not None:
        assert (found.mass.w, found.mass.exponent) == (0.5, -700)
        for x, y in zip(found.mass.x, X, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"\xff\x00"], "not readable"),
        ([b"[" * 100_000], "not readable"),
        (encoded(SHARE, job="another"), "of another job"),
        (encoded(SHARE, kind="pickle"), "of an unknown kind"),
        (encoded(SHARE, number=-1), "with a number"),
        (encoded(SHARE, sender=[1, "life", "any text"]), "with an identity"),
        (encoded(VIEW, view=None), "with a view"),
        (encoded(VIEW, view=VIEW_FIELDS | {"deaths": [[SENDER, "b", 10**400]]}), "with a view"),
        (encoded(VIEW, sender=[1, "\ud800", "host:1"]), "with a name"),
        (encoded(VIEW, view=VIEW_FIELDS | {"members": [[]] * 30_000}), "with a view"),
        (encoded(VIEW, view=VIEW_FIELDS | {"beats": []}), "with a view"),
        (encoded(Message("answer", SENDER, "other", 1, MASS), weight=[float("inf"), 0]), "weight"),
    ],
)
def test_what_is_no_message_of_the_job_has_a_reason(frames, reason):
    with pytest.raises(MessageError, match=reason):
        decode(frames, FORM)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (encoded(SHARE, weight=[float("inf"), 0]), "with a weight"),
        (encoded(SHARE, weight=[1.0, 1 << 30]), "with a weight"),
        (encoded(SHARE, weight=[0.0, 0]), "with NaN"),
        (encoded(SHARE, is_narrow=False), "of another shape"),
        ([*encoded(SHARE), b"1234"], "of another shape"),
        (encoded(SHARE._replace(mass=make_narrow((X[0], X[1] * np.inf)))), "with NaN"),
    ],
)
def test_a_parcel_that_cannot_be_read_has_a_reason_that_its_sender_is_told(frames, reason):
    found = decode(frames, FORM)
    assert found.kind == "share"
    assert found.mass is None
    assert reason in found.text


ODD = (None, True, -1, 1.5, 2**63, 10**400, 1e308, float("nan"), "", "\ud800", "x" * 1000)
ODD += ("127.0.0.1:9", [], {}, [[]] * 50)


def mutate(rng, value):
    """Another value somewhere in a JSON document."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(keys)
        value[key] = mutate(rng, value[key])
        return value
    return copy.deepcopy(rng.choice(ODD))


def write_mutated(rng, messages, form):
    """The frames of a message, or of a piece of one, of which something was changed."""
    message = rng.choice(messages)
    first, *frames = map(bytes, encode(message, form))
    says, kind = json.loads(first), b""
    if rng.random() < 0.3:
        piece = b"P", [SENDER.address, SENDER.life, 1, 0, [9, 9]]
        kind, says = rng.choice([piece, (b"A", [SENDER.address, SENDER.life, 1, 9])])
    for _ in range(rng.randrange(4)):
        says = mutate(rng, says)
    data = bytearray(kind + json.dumps(says).encode())
    if rng.random() < 0.4:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.1:
        del data[rng.randrange(1, len(data)) :]
    return [bytes(data), *frames[: rng.randrange(len(frames) + 1)], *[b"x"] * rng.randrange(2)]


@pytest.mark.parametrize("secret", [None, SECRET])
def test_mutated_messages_change_nothing(secret):
    """They are from one that knows the life of the node."""
    rng = random.Random(0)
    with (
        join(secret=secret, place=7, patience=2.0) as a,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
    ):
        a.step(gradients, 1.0)
        weight, model = a.statistics.weight, np.asarray(a.params)
        stranger.linger = 0
        if secret:
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.curve_serverkey, _ = make_keys(secret)
        stranger.connect(f"tcp://{a.address}")
        life = a._participant.life
        mass = Mass((np.ones(3, np.float32),), 0.5)
        # Right ones change nothing, either: the numbers of parcels are out of order.
        kinds = [kind for kind in KINDS if kind != "dead"]
        messages = [Message(k, SENDER, life, 90_071, mass, OWN_VIEW, text="t") for k in kinds]
        messages += [Message(k, SENDER, None, view=OWN_VIEW) for k in ("view", "dead")]
        for _ in range(MUTATED):
            stranger.send_multipart(write_mutated(rng, messages, a._service._job))
        stranger.send(b"the last")
        host, port = a.address.split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"\xff" * 64)
        dropped = a._participant.post.dropped
        wait_for(lambda: sum(a.statistics.dropped.values()) > MUTATED / 2)
        assert a._service._error is None
        assert not [reason for reason in dropped if reason.startswith("raising")]
        assert a.statistics.weight == weight
        np.testing.assert_array_equal(a.params, model)
        a.step(gradients, 1.0)


def test_what_one_message_raises_is_counted(monkeypatch):
    """And the end names who does not end."""
    with join() as a, join(a.address, place=1) as b:
        wait_for(lambda: a.members == b.members == [0, 1])
        with pytest.raises(TimeoutError, match="place 1: still trains, at step 0"):
            a.average(timeout=0.1)
        learn = a._participant._learn
        monkeypatch.setattr(a._participant, "_learn", lambda *args: 1 // 0)
        wait_for(lambda: "raising ZeroDivisionError" in a.statistics.dropped)
        monkeypatch.setattr(a._participant, "_learn", learn)
        a.step(gradients, 1.0)


@pytest.mark.parametrize(
    ("different", "reason"),
    [
        ({"job": "another"}, "of another job, not 'job'"),
        ({"params": jnp.zeros(4)}, "of another model, not '3 parameters in 1 arrays,"),
        ({"wire": "bfloat16"}, "of another wire, not 'float32 float32'"),
        ({"algorithm": ga.sgp()}, r"of another algorithm, not 'Outer\(every=8,"),
        ({"algorithm": ga.outer(8, learning_rate=0.5)}, r"of another algorithm, .*_rate=0.7, "),
    ],
)
def test_who_does_not_fit_into_a_job_is_told_why_at_once(different, reason):
    own = {"tx": optax.sgd(0.1), "params": jnp.zeros(3), "algorithm": ga.outer(8), "job": "job"}
    with ga.join(**own) as a, ga.join(address=a.address, place=1, **own | different) as other:
        told = f"{a.address} says that this node is {reason}.* Give all nodes of the job the same"
        with pytest.raises(TimeoutError, match=told) as error:
            other.wait_for_mass(timeout=60)
        assert "in 60 seconds" not in str(error.value)  # it did not wait for that
        assert list(a.statistics.dropped) == [reason.partition(",")[0]]
        assert a.members == [0]


def test_what_to_do_where_nobody_gives(monkeypatch):
    """Nobody listens, nothing arrives, nobody has founded the job, or nobody is known."""
    with join("127.0.0.1:9") as a, pytest.raises(TimeoutError, match="Give the address of a node"):
        a.wait_for_mass(timeout=0.1)
    with join() as a, join(a.address, place=1, is_founder=False) as b:
        monkeypatch.setattr(a._participant, "_give", lambda: None)
        wait_for(lambda: b._participant.members.list_members())
        told = "holds a model, but nothing of it arrives here. If the path loses large packets"
        with pytest.raises(TimeoutError, match=told):
            b.wait_for_mass(timeout=0.1)
    founds = r"One node must found the job: give it no address, or is_founder=True"
    with join(is_founder=False) as a, join(a.address, place=1) as b:
        wait_for(lambda: b._participant.members.peers)
        with pytest.raises(TimeoutError, match=f"has nothing to give. {founds}"):
            b.wait_for_mass(timeout=0.1)
    with join(is_founder=False) as a, pytest.raises(TimeoutError, match=f"no address. {founds}"):
        a.wait_for_mass(timeout=0.1)


@pytest.mark.parametrize("secret", ["another secret that is long", None])
def test_who_has_not_the_secret_does_not_meet(secret):
    with join(secret=SECRET) as a:
        other = join(a.address, secret=secret, place=1)
        told = "refuses this one, which has another secret. Compare GOSSIPJAX_SECRET"
        with pytest.raises(TimeoutError, match=told) as error:
            other.wait_for_mass(timeout=60)
        assert "in 60 seconds" not in str(error.value)
        assert a.members == [0]
        assert SECRET not in repr(a._settings)
        other.leave()


def test_without_a_secret_nothing_is_sent_to_other_machines(monkeypatch):
    """Whatever address a stranger names: not even a name server is asked for one."""
    named = "192.0.2.1:5000"
    connected = []
    connect = zmq.Socket.connect

    def record(socket, address):
        connected.append(address)
        return connect(socket, address)

    monkeypatch.setattr(zmq.Socket, "connect", record)
    ask = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *args, **more: connected.append(host) or ask(host, *args, **more),
    )
    monkeypatch.setattr(socket, "create_connection", lambda address, _: connected.append(address))
    with join(patience=0.5) as a, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://{a.address}")
        stranger.linger = 0
        form = a._service._job
        sender = Identity(1, "life", named)
        others = Identity(2, "other", named), Identity(3, "third", "elsewhere.example:5000")
        view = View(members=others, beats=(1, 1))
        life = a._participant.life
        met = Message("view", sender, life, view=view)
        for message in (met._replace(receiver=None), met, Message("dead", sender, "other")):
            stranger.send_multipart([bytes(f) for f in encode(message, form)])
        another = form._replace(header=form.header | {"job": "another"})
        stranger.send_multipart([bytes(f) for f in encode(message, another)])
        stranger.send(b"P" + json.dumps([named, "process", 1, 0, [9]]).encode())
        wait_for(lambda: "of another job" in a.statistics.dropped)
        wait_for(lambda: a.members == [0, 1])
        wait_for(lambda: a.members == [0])  # it has spoken to the stranger, who is silent
        assert named in a._participant.members.contacts
        a._service.explain_silence()
    assert connected
    assert not [one for one in connected if "192.0.2.1" in one or "elsewhere" in one]


def test_two_living_nodes_with_one_place_are_told_so():
    """The newcomer is refused, and the other goes on; a former life that is silent refuses none."""
    with join(patience=1.0) as a:
        former = join(a.address, place=1, patience=1.0)
        former.step(gradients, 1.0)
        wait_for(lambda: a.members == [0, 1])
        former._service.close()  # as a kill
        with join(a.address, place=1, patience=1.0) as b:
            b.step(gradients, 1.0)
            with join(b.address, place=1, patience=1.0) as c:
                wait_for(lambda: c._participant.members.twin)
                other = f"the node at {b.address}, which lives, has it: give each node a place of"
                with pytest.raises(ValueError, match=f"nobody else's, got 1, .*{other}"):
                    c.step(gradients, 1.0)
            b.step(gradients, 1.0)
        assert a._participant.members.twin is None


def test_large_messages_are_encrypted():
    """Frames are larger by what encryption adds."""
    params = jnp.ones(2**20 + 1)  # a little above 4 MiB
    options = {"algorithm": ga.sgp(), "secret": SECRET}
    with (
        ga.join(optax.sgd(0.1), params, **options) as a,
        ga.join(optax.sgd(0.1), params, address=a.address, place=1, **options) as b,
    ):
        b.wait_for_mass(timeout=5)
        np.testing.assert_array_equal(b.params, params)


def to_nan(params, target):
    return params + jnp.nan, None


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_an_update_with_nan_is_left_out(nonfinite, tmp_path):
    """The sick node keeps its model, mixes with the others, and hands over what it holds."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    with (
        join(nonfinite=nonfinite, journal=paths[0]) as a,
        join(a.address, place=1, is_founder=True, journal=paths[1]) as b,
    ):
        wait_for(lambda: b.members == [0, 1] == a.members)
        for step in range(20):
            b.step(gradients, 3.0)
            if step % 2:
                a.step(gradients, 1.0)
            elif nonfinite == "skip":
                a.step(to_nan, 1.0)
            else:
                with pytest.raises(FloatingPointError, match=f"update of step {step} must be fin"):
                    a.step(to_nan, 1.0)
        assert a.statistics.skipped == 10
        assert 0 < float(a.params[0]) < 3
        assert 0 < float(b.params[0]) < 3
        a.leave()
    account = ga.account(paths)
    assert account.founded == 2
    assert account.written_off == 0
    assert abs(account.difference) < 1e-12


def test_an_absurd_update_is_left_out():
    """`refuse_outliers` makes it one that is not finite."""
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), gx.refuse_outliers())

    def scaled(params, target, scale):
        return scale * (params - target), None

    with ga.join(tx, jnp.zeros(3), algorithm=ga.sgp(), nonfinite="skip") as node:
        for scale, skipped in ((1.0, 0), (1e3, 0), (1e6, 1), (1.0, 1)):
            before = np.asarray(node.params)
            node.step(scaled, 1.0, scale)
            assert node.statistics.skipped == skipped
            assert (before == node.params).all() == (scale == 1e6)


def test_nobody_waits_for_a_node_whose_step_failed():
    """Its program goes on without steps; the average has its model."""
    with join() as a, join(a.address, place=1, is_founder=True) as b:
        wait_for(lambda: b.members == [0, 1] == a.members)
        with pytest.raises(FloatingPointError):
            a.step(to_nan, 1.0)
        b.step(gradients, 1.0)
        average = b.average(timeout=10)
        assert set(b.final_models) == {0, 1}
        np.testing.assert_array_equal(average, a.average(timeout=10))


def test_a_model_that_is_not_finite_is_written_off(tmp_path):
    """The node goes on as one that has just joined."""

    def overflow(params, target):
        return jnp.full_like(params, -2.5e38), None  # the second such step overflows

    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    with (
        ga.join(
            optax.sgd(1.0), jnp.zeros(3), algorithm=ga.sgp(), job="job",
            journal=paths[0], nonfinite="skip",
        ) as a,
        join(a.address, place=1, is_founder=True, journal=paths[1]) as b,
    ):  # fmt: skip
        wait_for(lambda: b.members == [0, 1] == a.members)
        for _ in range(30):
            a.step(overflow, 1.0)
            b.step(gradients, 1.0)
            assert np.isfinite(b.params).all()
            if ga.account(paths).written_off:
                break
        a.wait_for_mass(timeout=10)
        assert np.isfinite(a.params).all()
        b.leave()
    account = ga.account(paths)
    assert account.written_off > 0
    assert abs(account.difference) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "nowhere"}, "address must be HOST:PORT"),
        ({"listen": "192.0.2.1:0"}, "must have a secret"),
        ({"listen": "0.0.0.0:0"}, "listen must say where others reach a node"),
        ({"address": "192.0.2.1:5000"}, "must have a secret"),
        ({"secret": "a word"}, "secret must have 16 characters or more, got 6"),
        ({"tx": None}, "tx must be an optax.GradientTransformation, got NoneType"),
        ({"tx": optax.chain(gx.allreduce(), optax.sgd(0.1))}, "tx must update one node by itself"),
        ({"algorithm": gx.sgp(gx.topology.ring(4))}, "algorithm must be gx.asynchronous.sgp"),
        ({"wire": gx.wire.top_k(0.1)}, "wire must be"),
        ({"wire": "bfloat16", "algorithm": ga.adpsgd()}, "wire must be None with adpsgd"),
        ({"clip": 3, "algorithm": ga.adpsgd()}, r"clip must be None with adpsgd.*use sgp\(\)"),
        *(({"clip": c}, "clip must be a number >= 1, such as 1") for c in (0, 0.5, math.inf)),
    ],
)
def test_bad_arguments(options, message):
    arguments = {"address": None, "tx": optax.sgd(0.1), "params": jnp.zeros(3)}
    with pytest.raises(ValueError, match=message):
        ga.join(**arguments | {"algorithm": ga.sgp()} | options)


def test_a_step_whose_function_is_not_as_it_must_be():
    """The loss in place of the gradients, and another function for each step."""
    with join() as node:
        with pytest.raises(ValueError, match=r"jax\.value_and_grad returns in the other order"):
            node.step(jax.value_and_grad(jnp.sum))
        for _ in range(8):
            node.step(lambda params: (params, None))
        with pytest.warns(UserWarning, match="the 9th: define `gradients` once, outside"):
            node.step(lambda params: (params, None))
        node.step(lambda params: (params, None))


def test_an_address_in_use_and_a_node_that_has_left():
    with join() as a, pytest.raises(OSError, match="must listen at"):
        join(listen=a.address)
    a.leave()
    with pytest.raises(RuntimeError, match="has left"):
        a.step(gradients, 1.0)
