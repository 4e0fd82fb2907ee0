"""What a call is made by: the commit of the code, and the machine."""

import os
import platform
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def find_commit() -> str:
    """Returns the commit of this checkout, with `-dirty` if files differ; "" if there is none."""
    command = ["git", "-C", f"{ROOT}", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:  # there is no git
        return ""


def find_machine() -> str:
    """Returns processor, cores and system."""
    return f"{find_processor()}, {os.cpu_count()} cores, {platform.system()}"


def find_processor() -> str:
    """Returns the name of the processor; its architecture where that is all that is known."""
    path = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.+)", path.read_text()) if path.exists() else None
    return match[1] if match else platform.machine()
