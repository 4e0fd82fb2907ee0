"""The files for clusters have the fields that Kubernetes, JobSet and Kubeflow Trainer know."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models

import experiments
from experiments.cluster.manifest import make_manifest
from gossipjax.launch import _initialize

FOLDER = Path(experiments.__path__[0]) / "cluster"
KINDS: dict[str, Any] = {
    "Service": models.IoK8sApiCoreV1Service,
    "Job": models.IoK8sApiBatchV1Job,
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
# Not in these models: its fields are few.
CLAIM = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "10Gi"}}}


COMMAND = ["python", "train.py", "--text", "a 'b'"]


def read(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def find_unknown(given: Any, known: Any, path: str = "") -> list[str]:
    """The fields of `given` that are not in `known`."""
    if isinstance(given, dict):
        missing = [f"{path}.{key}" for key in given if key not in known]
        inside = [find_unknown(given[k], known[k], f"{path}.{k}") for k in given if k in known]
    elif isinstance(given, list):
        missing = []
        pairs = enumerate(zip(given, known, strict=True))
        inside = [find_unknown(a, b, f"{path}[{i}]") for i, (a, b) in pairs]
    else:
        return []
    return missing + [name for names in inside for name in names]


def check(manifest):
    model = KINDS[manifest["kind"]].from_dict(manifest)
    assert find_unknown(manifest, model.to_dict()) == []


@pytest.mark.parametrize("name", ["kubernetes.yaml", "jobset.yaml", "kubeflow.yaml"])
def test_a_manifest_is_valid(name):
    for manifest in read(name):
        if manifest["kind"] == "PersistentVolumeClaim":
            assert manifest["spec"] == CLAIM
        else:
            check(manifest)


def test_skypilot_says_who_a_machine_is():
    (task,) = read("skypilot.yaml")
    lines = [line for line in task["run"].splitlines() if line.startswith("export ")]
    script = "\n".join([*lines, "env | grep ^GOSSIPJAX_"])
    given = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    environment = os.environ | given | {"SKYPILOT_NODE_RANK": "1"}
    done = subprocess.run(
        ["bash", "-euc", script], env=environment, capture_output=True, text=True, check=True
    )
    assert sorted(done.stdout.split()) == [
        "GOSSIPJAX_COORDINATOR_ADDRESS=10.0.0.1:29500",
        "GOSSIPJAX_NUM_PROCESSES=2",
        "GOSSIPJAX_PROCESS_ID=1",
    ]


def find_container(manifests):
    """The container of the training program."""
    (manifest,) = (part for part in manifests if part["kind"] in ("Job", "JobSet"))
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"]
    (container,) = spec["template"]["spec"]["containers"]
    return container


def variables_of(container):
    """The variables with which the process of pod 3 starts."""
    labels = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": "3",
        "metadata.labels['controller-uid']": "b7",
        "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": "1",
    }
    return {
        variable["name"]: variable.get("value")
        or labels[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        for variable in container["env"]
    }


@pytest.mark.parametrize("scheduler", ["kubernetes", "jobset", "kubeflow"])
def test_a_manifest_for_another_job_is_valid(scheduler, monkeypatch):
    image = "example.org/gossipjax:4"
    text = make_manifest(scheduler, 7, "run-1", image, COMMAND)
    manifests = list(yaml.safe_load_all(text))
    for manifest in manifests:
        if manifest["kind"] != "PersistentVolumeClaim":
            check(manifest)
            assert manifest["metadata"]["name"] == "run-1"
    if scheduler == "kubeflow":
        trainer = manifests[0]["spec"]["trainer"]
        assert (trainer["image"], trainer["command"]) == (image, COMMAND)
        assert trainer["numNodes"] == 7
        return
    container = find_container(manifests)
    assert (container["image"], container["command"]) == (image, COMMAND)
    for variable, value in variables_of(container).items():
        monkeypatch.setenv(variable, value)
    host = {"kubernetes": "run-1-0.run-1", "jobset": "run-1-node-0-0.run-1"}[scheduler]
    requested = _initialize.process_from_arguments(None, None, None)
    assert requested == ((3, 7), f"{host}:29500")


def test_a_script_of_slurm_for_another_job():
    text = make_manifest("slurm", 7, "run-1", "", COMMAND)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --nodes=7\n" in text
    assert "#SBATCH --job-name=run-1\n" in text
    assert """  python train.py --text 'a '"'"'b'"'"'' "$@" &\n""" in text


def test_bad_jobs():
    for nodes, name, command, message in (
        (0, "a", COMMAND, "--nodes must be at least 1, got 0"),
        (2, "A b", COMMAND, "--name must be small letters"),
        (2, "a", [], "got none"),
    ):
        with pytest.raises(ValueError, match=message):
            make_manifest("jobset", nodes, name, "image", command)
