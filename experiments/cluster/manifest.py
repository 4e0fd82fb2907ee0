"""Prints a file of this folder for a job of your own, so that nothing is edited in four places.

python -m experiments.cluster.manifest jobset --nodes 8 --name a --image IMAGE -- python train.py
"""

import json
import re
import shlex
from pathlib import Path
from typing import Literal

import tyro

FILES = {
    "kubernetes": "kubernetes.yaml",
    "jobset": "jobset.yaml",
    "kubeflow": "kubeflow.yaml",
    "slurm": "slurm.sbatch",
}
IMAGE = "registry.example.org/gossipjax:latest"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # of a host, with what is added to it


def make_manifest(
    scheduler: Literal["kubernetes", "jobset", "kubeflow", "slurm"],
    nodes: int,
    name: str,
    image: str,
    command: list[str],
) -> str:
    """Returns the file of a scheduler for `nodes` processes that run `command`.

    Raises:
      ValueError: if `nodes` is less than 1, `name` is no name of a host, or there is no command.
    """
    if nodes < 1:
        raise ValueError(f"--nodes must be at least 1, got {nodes}.")
    if not NAME.fullmatch(name):
        raise ValueError(f"--name must be small letters, digits and hyphens, got {name!r}.")
    if not command:
        raise ValueError("the line must end with -- and a command, got none: -- python train.py")
    text = Path(__file__).with_name(FILES[scheduler]).read_text()
    if scheduler == "slurm":
        text = text.replace("--nodes=4", f"--nodes={nodes}")
        text = text.replace("--job-name=gossipjax", f"--job-name={name}")
        run = re.compile(r'"\$python" -m experiments\.image.*?"\$@"', re.DOTALL)
        return run.sub(lambda _: f'{shlex.join(command)} "$@"', text)
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)  # of the image experiment
    text = re.sub(r'(\W)4("?) # edit.*', rf"\g<1>{nodes}\2", text)
    text = text.replace(f"{IMAGE} # edit", "IMAGE").replace(
        "[python, -m, experiments.image]", "RUN"
    )
    text = re.sub(r"\n *(args: |# edit: --nodes).*", "", text)
    # Not the folder, the package, the volume or the field manager of the same name.
    text = re.sub(r"(?<!/)\bgossipjax\b(?! import|-runs|/)", name, text)
    return text.replace("IMAGE", json.dumps(image)).replace("RUN", json.dumps(command))


def main(
    scheduler: tyro.conf.Positional[Literal["kubernetes", "jobset", "kubeflow", "slurm"]],
    command: tyro.conf.Positional[list[str]],
    nodes: int,
    name: str = "gossipjax",
    image: str = IMAGE,
) -> None:
    """Prints the file of a scheduler.

    Args:
      scheduler: what starts the job.
      command: what each process runs.
      nodes: the number of processes, one for each pod or task.
      name: the name of the job.
      image: where Kubernetes finds the program; Slurm needs none.
    """
    print(make_manifest(scheduler, nodes, name, image, command), end="")


if __name__ == "__main__":
    tyro.cli(main)
