"""Every Python block of the README runs, in order, in one namespace; its claims of names hold."""

import re
from pathlib import Path

import jax.numpy as jnp
import optax

import gossipjax as gx

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 4
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    average = namespace["average"]["w"][0]
    assert abs(average - namespace["jnp"].array([1.0, -2.0, 3.0, 0.5])).max() < 0.3


def test_every_line_of_the_table_is_code_that_builds():
    n, k, rate = 8, 3, 0.1
    schedule = gx.topology.one_peer_exponential(n)
    names = {"gx": gx, "optax": optax, "n": n, "k": k, "rate": rate, "schedule": schedule}
    names |= {"jnp": jnp}
    rows = README.split("## The names of the papers")[1].split("\n\n")[1].splitlines()[2:]
    built = 0
    for row in rows:
        for code in re.findall(r"`([^`]+)`", row.split("|")[3]):
            if code.startswith(("gx", "optax")) and "mix" not in code:
                eval(code, dict(names))
                built += 1
    assert built >= 26


def test_the_example_is_short():
    example = README.split("## Put it into")[1].split("```python\n")[1].split("```")[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 22


def test_no_placeholder_is_left():
    assert "@@" not in README
    assert "average" in README.split("```text")[1].split("```")[0]


def test_commands_are_marked_for_ci():
    for marker in ("main command", "test command"):
        assert len(re.findall(f"<!-- {marker} -->\n```sh\n[^\n]+\n```", README)) == 1
