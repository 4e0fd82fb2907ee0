"""The settings of XLA and NCCL that docs/guides/gpus.md lists."""

import re
import subprocess
import sys

from launching import ROOT, environment


def test_xla_knows_the_flag():
    """XLA ends a process at a flag that it does not know."""
    page = (ROOT / "docs/guides/gpus.md").read_text()
    lines = re.findall(r"^(?:export|FAST=).*\n", page, re.MULTILINE)
    assert len(lines) == 4
    script = "".join(lines) + f'{sys.executable} -c "import jax; print(jax.devices())"'
    command = ["sh", "-c", script]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.stdout.startswith("[CpuDevice"), done.stderr[-2000:]
