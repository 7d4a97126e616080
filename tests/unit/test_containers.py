import copy
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def manifest(name):
    return yaml.safe_load((ROOT / "launchers" / name).read_text())


def pods(job):
    """Pod specs of the head and of the workers."""
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_cuda_image_has_the_libraries_of_infiniband_and_what_kuberays_probes_call():
    text = (ROOT / "docker" / "Dockerfile.cuda").read_text().replace("\\\n", " ")
    found = re.search(r"apt-get install -y --no-install-recommends (.*?)&&", text)
    assert found is not None
    packages = set(found[1].split())
    assert {"libibverbs1", "ibverbs-providers", "rdma-core", "wget"} <= packages


def test_documented_docker_run_gives_nccl_the_network_of_the_host():
    needed = ("--network=host", "--device=/dev/infiniband", "--cap-add=IPC_LOCK", "memlock=-1")
    for page in ("docs/gpu.md", "docker/Dockerfile.cuda"):
        text = (ROOT / page).read_text()
        assert [one for one in needed if one not in text] == [], page


def test_rdma_manifest_adds_network_devices_and_locked_memory_and_nothing_else():
    rdma = manifest("kuberay_rdma.yaml")
    for pod in pods(rdma):
        (container,) = pod["containers"]
        assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
        assert pod["hostNetwork"] is True
        (path,) = [one for one in pod["volumes"] if one["name"] == "infiniband"]
        assert path["hostPath"]["path"] == "/dev/infiniband"
        assert {"name": "infiniband", "mountPath": "/dev/infiniband"} in container["volumeMounts"]
    # Head and workers are one object in the file.
    plain = copy.deepcopy(rdma)
    for pod in pods(plain):
        (container,) = pod["containers"]
        for key in ("hostNetwork", "dnsPolicy"):
            pod.pop(key, None)
        container.pop("securityContext", None)
        for volumes in (pod["volumes"], container["volumeMounts"]):
            volumes[:] = [one for one in volumes if one["name"] != "infiniband"]
    assert plain == manifest("kuberay.yaml")


@pytest.mark.parametrize("name", ["kuberay.yaml", "kuberay_rdma.yaml"])
def test_workers_have_time_to_import_from_a_shared_disk(name):
    for pod in pods(manifest(name)):
        (container,) = pod["containers"]
        assert {"name": "RAY_worker_register_timeout_seconds", "value": "300"} in container["env"]
