"""Two asynchronous nodes on bad paths: what arrives, and when they meet again.

    python -m experiments.fault_injection.paths --path cut --seconds 80
    python -m experiments.fault_injection.paths --path firewall --seconds 5
    python -m experiments.fault_injection.paths --path name

`cut`: for `--seconds`, all packets are dropped without a word. `firewall`: both hosts drop packets
of connections on which nothing has passed for `--seconds`. `name`: a third address of the job is a
name that no server answers. Each node is in a network namespace. Linux, as root, with `nft`.

Required: a share arrives within 5 s of the beginning, or of the end of the cut (behind a firewall,
where nodes send seldom, within 5 s of the time of their first); at least 9 of 10 shares arrive; the
account of the weight closes to 1e-9. The exit status is 1 if not.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import optax
import tyro

import gossipjax as gx
from experiments.options import PositiveFloat
from experiments.runner import Processes
from experiments.speed.wire.links import HOST_FILES, INTERFACE, make_network, run_command

RATE = 100_000_000  # bits per second
STEP_SECONDS = 0.05
MEET_SECONDS = 20.0  # for which the nodes train before and after the fault
MAX_SECONDS = 5.0  # until a share arrives
MIN_ARRIVED = 0.9
MAX_DIFFERENCE = 1e-9
SIZE = 100_000  # numbers in the model: it travels in pieces, over the connection for models
DROP = {
    "cut": f"iifname {INTERFACE} drop",
    "firewall": "ct state established accept; add rule ip f i tcp flags & (syn|ack) == syn accept; "
    f"add rule ip f i iifname {INTERFACE} meta l4proto tcp drop",
    "name": "udp dport 53 drop",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Puts two asynchronous nodes on a bad path."""

    path: Literal["cut", "firewall", "name"] = "cut"
    """What is bad."""
    seconds: PositiveFloat = 30.0
    """Seconds of the cut, or after which a firewall forgets a connection."""


def train(seconds: float, every: int, journal: Path) -> None:
    """Runs a node: its place and addresses are in the variables of asynchronous nodes."""
    end = time.time() + seconds
    algorithm = gx.asynchronous.outer(every)
    with gx.asynchronous.join(
        optax.sgd(0.01), jnp.zeros(SIZE), algorithm=algorithm, journal=journal, is_founder=True
    ) as node:
        while time.time() < end:
            node.step(compute_gradients, float(node.place))
            time.sleep(STEP_SECONDS)


def compute_gradients(params: jnp.ndarray, target: float) -> tuple[jnp.ndarray, None]:
    """Gradients of half the squared distance to a target."""
    return params - target, None


def set_rule(namespaces: list[str], rule: str) -> None:
    """Adds a rule for what comes in."""
    table = (
        "add table ip f; add chain ip f i { type filter hook input priority 0; }; add rule ip f i"
    )
    for name in namespaces:
        run_command("ip", "netns", "exec", name, "nft", f"{table} {rule}")


def run(options: Options, folder: Path) -> list[str]:
    """Runs the nodes and the fault; returns the requirements that were violated."""
    is_cut = options.path == "cut"
    every = 1
    seconds = 2 * MEET_SECONDS + (options.seconds if is_cut else 0)
    if options.path == "firewall":  # a model now and then, for which the connection must last
        every = int(2 * options.seconds / STEP_SECONDS)
        seconds += 6 * options.seconds
    with make_network(2, RATE) as hosts, Processes() as processes:
        names = [str(host.namespace) for host in hosts]
        addresses = [f"{host.address}:5000" for host in hosts]
        if options.path == "name":
            addresses.append("nobody.example.com:5000")
            for host, name in zip(reversed(hosts), names, strict=True):
                (HOST_FILES / name / "resolv.conf").write_text(f"nameserver {host.address}\n")
        if not is_cut:
            set_rule(names, DROP[options.path])
        if options.path == "firewall":
            settings = ("tcp_timeout_established", "tcp_timeout_unacknowledged")
            values = [f"net.netfilter.nf_conntrack_{x}={options.seconds:.0f}" for x in settings]
            values.append("net.netfilter.nf_conntrack_tcp_loose=0")
            for name in names:
                run_command("ip", "netns", "exec", name, "sysctl", "-qw", *values)
        started = []
        for place, host in enumerate(hosts):
            environment = os.environ | {
                "GOSSIPJAX_NODE_ADDRESSES": ",".join(addresses),
                "GOSSIPJAX_NODE": str(place),
                "GOSSIPJAX_SECRET": "a secret of this program",
            }
            command = [sys.executable, "-m", "experiments.fault_injection.paths", "train"]
            command += [str(seconds), str(every), str(folder / f"{place}.jsonl")]
            command = [*host.prefix, *command]
            started.append(processes.start(command, folder / f"{place}.log", environment))
        if is_cut:
            time.sleep(MEET_SECONDS)
            set_rule(names, DROP["cut"])
            time.sleep(options.seconds)
            for name in names:
                run_command("ip", "netns", "exec", name, "nft", "delete table ip f")
        since = time.time()
        for process in started:
            process.wait()
    until_sent = every * STEP_SECONDS if every > 1 else 0.0
    journals = sorted(folder.glob("*.jsonl"))
    return judge(journals, since if is_cut else None, MAX_SECONDS + 1.5 * until_sent)


def judge(journals: list[Path], since: float | None, seconds: float) -> list[str]:
    """Prints what arrived, and returns the requirements that were violated."""
    lines = [json.loads(line) for path in journals for line in path.read_text().splitlines()]
    begin = since or max(x["time"] for x in lines if x["event"] == "found")
    times = [x["time"] for x in lines if x["event"] == "receive" and x["time"] > begin]
    first = min(times, default=float("inf")) - begin
    sent = sum(x["event"] == "share" for x in lines)
    back = sum(x["event"] == "return" for x in lines)
    difference = gx.asynchronous.account(journals).difference
    print(f"{sent - back} of {sent} shares arrived, the first {first:.1f} s after the fault")
    checks = {
        f"a share within {seconds:g} s, got {first:.1f}": first <= seconds,
        f"{MIN_ARRIVED:g} of {sent} shares, got {sent - back}": sent - back >= MIN_ARRIVED * sent,
        f"an account that closes, got {difference}": abs(difference) <= MAX_DIFFERENCE,
    }
    return [text for text, holds in checks.items() if not holds]


def main() -> None:
    """Runs the nodes on the bad path that the options say."""
    if sys.argv[1:2] == ["train"]:
        seconds, every, journal = sys.argv[2:]
        train(float(seconds), int(every), Path(journal))
        return
    options = tyro.cli(Options)
    with tempfile.TemporaryDirectory() as folder:
        violations = run(options, Path(folder))
    if violations:
        sys.exit("\n".join(["violated:", *violations]))
    print("no requirement was violated")


if __name__ == "__main__":
    main()
