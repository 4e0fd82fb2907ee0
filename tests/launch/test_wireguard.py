"""What lockstep nodes send, as somebody on the way sees it: in the clear, and by the recipe."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from launching import ROOT, TIMEOUT, started_processes, two_machines

from experiments.speed.wire import links

RECIPE = ROOT / "docs" / "recipes" / "wireguard"
PAGE = RECIPE.with_suffix(".md").read_text()
ETH_P_ALL = 3
SO_RCVBUFFORCE = 33
MACHINES = ("A", "B")
IN_TUNNEL = ("10.99.0.1", "10.99.0.2")
TOOLS = ("ip", "tc", "wg", "wg-quick", "wireguard-go")
MISSING = [name for name in TOOLS if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING) or os.geteuid() != 0 or not Path("/dev/net/tun").exists(),
    reason=f"needs root, /dev/net/tun and programs of the system, of which are missing: {MISSING}",
)

# Both methods send models of equal numbers only, as all gradients are of equal numbers.
PROGRAM = """
import jax, jax.numpy as jnp, optax, gossipjax as gx
gx.launch.initialize()
nodes = gx.Nodes(mesh=gx.launch.mesh())
sgp = optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.one_peer_exponential(2)))
for tx in (sgp, gx.outer(optax.sgd(0.1), optax.sgd(0.7), every=2)):
    step = gx.TrainStep(lambda x, target: (x - target, None), tx, nodes=nodes)
    params, opt_state = nodes.init(tx, jnp.full(5000, 1.25))
    targets = nodes.put(jnp.array([3.0, 5.0])[jnp.array(nodes.local)])
    for k in range(4):
        params, opt_state, _ = step(k, params, opt_state, targets)
    print("mean", float(gx.average_model(params, opt_state, nodes=nodes)[0]), flush=True)
gx.launch.exit_process(0)
"""
# What `ip netns exec` mounts is seen by its own command only, as are files in these folders.
UP = """
set -e
mkdir -p /etc/wireguard /run/wireguard
mount -t tmpfs none /etc/wireguard
mount -t tmpfs none /run/wireguard
umask 077
cp "$FOLDER/$NAME.conf" "$FOLDER/$NAME.key" /etc/wireguard
wg-quick up "$NAME"
eval "$HOSTS"
exec "$@"
"""
REPEATED = re.compile(rb"(?s)(?!\0{4})(....)\1{15}")  # one number sixteen times


def read_packets(wire: socket.socket) -> list[bytes]:
    """The IP packets that have passed, without their frames."""
    frames = []
    with contextlib.suppress(BlockingIOError):
        while True:
            frames.append(wire.recv(1 << 17, socket.MSG_DONTWAIT))
    return [frame[14:] for frame in frames if frame[12:14] == b"\x08\x00"]


def write_recipe(folder: Path, address: str) -> None:
    """Fills in the files of the recipe, as its page says."""
    for machine, other in (MACHINES, MACHINES[::-1]):
        key = subprocess.run(["wg", "genkey"], capture_output=True, text=True, check=True).stdout
        public = subprocess.run(
            ["wg", "pubkey"], input=key, capture_output=True, text=True, check=True
        ).stdout.strip()
        (folder / f"gossip-{machine.lower()}.key").write_text(key)
        path = folder / f"gossip-{other.lower()}.conf"
        text = (RECIPE / path.name).read_text().replace(f"PUBLIC_KEY_OF_{machine}", public)
        path.write_text(text.replace("PUBLIC_ADDRESS_OF_A", address))


def run_machines(
    members: list[links.Host], folder: Path | None, *, is_named: bool
) -> list[tuple[int, str, str]]:
    """Runs the program on both, in the tunnel if its files are given.

    Returns their status, output and errors. `is_named`: their names are addresses in the tunnel.
    """
    [name_it] = re.findall(r"^hosts=.*\n.*\n", PAGE.replace("sudo ", ""), re.MULTILINE)
    addresses = IN_TUNNEL if folder else tuple(member.address for member in members)
    up = ["bash", "-c", UP, "up"] if folder else []
    variables = [
        {
            **given,
            "NAME": f"gossip-{machine.lower()}",
            "FOLDER": f"{folder}",
            "HOSTS": name_it.replace(IN_TUNNEL[0], address) if is_named else "",
        }
        for given, machine, address in zip(
            two_machines(f"{addresses[0]}:1234"),
            MACHINES,
            addresses,
            strict=True,
        )
    ]
    prefixes = [[*member.prefix, *up] for member in members]
    with started_processes(PROGRAM, variables, *prefixes) as processes:
        outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
        return [
            (process.returncode, *output)
            for process, output in zip(processes, outputs, strict=True)
        ]


@pytest.mark.parametrize("case", ["clear", "wireguard", "around the tunnel"])
def test_what_is_seen_on_the_way(case, tmp_path):
    """Gloo listens at the address of a machine's name, which is the one outside at first."""
    is_encrypted = case != "clear"
    network = links.make_network(2, links.parse_rate("1gbit"))
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # hears nothing until it is bound
    with network as members, wire:
        wire.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)
        wire.bind((f"gxs{os.getpid()}h0", ETH_P_ALL))
        if is_encrypted:
            write_recipe(tmp_path, members[0].address)
        folder = tmp_path if is_encrypted else None
        found = run_machines(members, folder, is_named=case == "wireguard")
        packets = read_packets(wire)
    statuses, outputs, errors = zip(*found, strict=True)
    by_tcp = [packet for packet in packets if packet[9] == socket.IPPROTO_TCP]
    assert bool(by_tcp) == (not is_encrypted)  # the coordinator's, too
    if case == "around the tunnel":
        assert statuses == (1, 1)
        line = f"`10.99.0.2 {socket.gethostname()}`"
        refused = f"Gloo of process 1 would listen at {members[1].address}, .* Let {line} be"
        assert all(re.search(refused, text) for text in errors), errors
        return
    assert statuses == (0, 0), errors
    means = [[line for line in output.splitlines() if "mean" in line] for output in outputs]
    assert means[0] == means[1]
    assert len(means[0]) == 2
    assert sum(map(len, packets)) > 100_000
    assert any(REPEATED.search(packet) for packet in packets) == (not is_encrypted)
