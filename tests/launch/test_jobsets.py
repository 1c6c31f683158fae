"""The JobSet files against the schema that the Kubernetes projects publish, in which no field is unknown."""

import re
import runpy

import pytest
import yaml
from conftest import ROOT, typed
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from largebatch import cli

FILES = sorted((ROOT / "launch").glob("jobset*.yaml"))


def read(path) -> dict:
    return yaml.safe_load(path.read_text())


def fields_of(container: dict) -> dict[str, str]:
    """The flags of its command, by name."""
    return dict(word.removeprefix("--").split("=", 1) for word in container["command"][2:])


def parts_of(job_set: dict) -> tuple[dict, dict, dict]:
    """The specs of its Job and of its pods, and their container."""
    [replicated] = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    return job, pod, container


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_a_job_set(path):
    """Every field is known and has a value of its type."""
    job_set = read(path)
    assert JobsetV1alpha2JobSet.from_dict(job_set).to_dict() == job_set  # what is not known is left out
    # What the schema does not say.
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    job, pod, container = parts_of(job_set)
    assert job["parallelism"] == job["completions"]
    assert job["completionMode"] == "Indexed"
    [rule] = job["podFailurePolicy"]["rules"]
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy demands
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["values"] == [cli.EXIT_USAGE, cli.EXIT_DIVERGED]
    mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
    assert mounts == {volume["name"] for volume in pod.get("volumes", [])}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_command_of_a_file_is_one_that_train_takes(path):
    _, _, container = parts_of(read(path))
    python, script, *arguments = container["command"]
    assert (python, script) == ("python", "train.py")
    fields = fields_of(container)
    assert len(fields) == len(arguments)
    assert {name.split(".")[0] for name in fields} == {"config", "workdir"}
    config = runpy.run_path(str(ROOT / fields["config"]))["get_config"]()
    with config.ignore_type():
        for name, value in fields.items():
            if name.startswith("config."):
                config.update_from_flattened_dict({name.removeprefix("config."): yaml.safe_load(value)})
    typed(config)


def test_the_gpu_file_names_its_own_pods():
    job_set = read(ROOT / "launch" / "jobset_gpu.yaml")
    job, _, container = parts_of(job_set)
    fields = fields_of(container)
    name, network = job_set["metadata"]["name"], job_set["spec"]["network"]
    # <JobSet>-<replicated job>-<job>-<pod>.<subdomain>
    first = f"{name}-{job_set['spec']['replicatedJobs'][0]['name']}-0-0.{network['subdomain']}"
    assert fields["config.devices.coordinator_address"].rsplit(":")[0] == first
    assert int(fields["config.devices.num_hosts"]) == job["parallelism"]
    assert re.fullmatch(r"[a-z0-9-]+", name)
