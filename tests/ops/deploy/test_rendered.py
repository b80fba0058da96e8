"""The files of `ops/deploy` as their own tools read them: rendered, and checked against published schemas."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ops.deploy.test_deploy_files import DEPLOY, parts, units

pytestmark = pytest.mark.full

#: The components of each overlay. The example has a folder of its own.
OVERLAYS: dict[str, list[str]] = {
    "example": [],
    "with-scavengers": ["../redis", "../dash", "../scavengers"],
    "with-autoscaled": ["../dash", "../autoscaled", "../cuda"],
    "with-joins": ["../redis", "../joins"],
}


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files for Kubernetes, without a secret."""
    copy = tmp_path_factory.mktemp("deploy") / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", copy, ignore=shutil.ignore_patterns("secret.env"))
    return copy


def rendered(folder: Path) -> subprocess.CompletedProcess[str]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    return subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def overlays(kubernetes: Path) -> dict[str, list[dict[str, Any]]]:
    """The objects that each overlay makes, by its name."""
    done = rendered(kubernetes / "example")
    assert done.returncode != 0 and done.stdout == "", "nothing is rendered without a secret"
    assert "secret.env" in done.stderr and "no such file" in done.stderr
    (kubernetes / "example" / "secret.env").write_text("url=redis://:x@archipelago-redis:6379\npassword=x\n")
    out = {}
    for name, components in OVERLAYS.items():
        folder = kubernetes / name
        if components:
            folder.mkdir()
            lines = {"resources": ["../base"], "components": components}
            (folder / "kustomization.yaml").write_text(yaml.safe_dump(lines))
        done = rendered(folder)
        assert done.returncode == 0, done.stderr
        out[name] = [each for each in yaml.safe_load_all(done.stdout) if each]
    return out


def jobs_of(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the jobs that a custom resource makes, as its controller would."""
    if manifest["kind"] == "JobSet":
        specs = [each["template"]["spec"] for each in manifest["spec"]["replicatedJobs"]]
    else:
        assert manifest["kind"] == "ScaledJob"
        specs = [manifest["spec"]["jobTargetRef"]]
    for number, spec in enumerate(specs):
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"job-{number}"}, "spec": spec}


def is_custom(manifest: dict[str, Any]) -> bool:
    return manifest["kind"] in ("JobSet", "ScaledJob")


def test_every_overlay_fits_the_schemas_of_kubernetes(overlays: dict[str, list[dict[str, Any]]]) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    for name, found in overlays.items():
        for manifest in found:
            for each in jobs_of(manifest) if is_custom(manifest) else [manifest]:
                schemas.validate(each, schemas.latest_version(), strict=True)
        kinds = ("Secret", "ConfigMap", "PersistentVolumeClaim")
        names = {each["metadata"]["name"] for each in found if each["kind"] in kinds}
        needed = {"archipelago"} | ({"archipelago-joins"} if name == "with-joins" else set())
        secrets = {each["name"] for manifest in found for each in parts(manifest, "secretKeyRef")}
        secrets |= {each["secretName"] for manifest in found for each in parts(manifest, "secret")}
        assert secrets == needed, "a secret that the guide does not name"
        assert {each["name"] for manifest in found for each in parts(manifest, "configMap")} <= names


def composed(tmp_path: Path, *files: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Let podman-compose merge these files and replace their variables. It asks podman for its version only."""
    pytest.importorskip("podman_compose")
    podman = tmp_path / "podman"
    podman.write_text("#!/bin/sh\necho podman version 5.0.0\n")
    podman.chmod(0o755)
    flags = [word for file in files for word in ("-f", str(DEPLOY / file))]
    return subprocess.run(
        [sys.executable, "-m", "podman_compose", *flags, "config"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
    )


def test_compose_files_fit_the_specification(tmp_path: Path) -> None:
    specification = pytest.importorskip("compose_spec")
    for files in (["compose.yaml"], ["compose.yaml", "compose.cuda.yaml"]):
        done = composed(tmp_path, *files, ARCHIPELAGO_PASSWORD="secret-1")
        assert done.returncode == 0, done.stderr
        specification.PyCompose.from_yaml(done.stdout).validate()
        services = yaml.safe_load(done.stdout)["services"]
        urls = {each["environment"]["ARCHIPELAGO_URL"] for name, each in services.items() if name != "redis"}
        assert urls == {"redis://:secret-1@redis:6379"}


def test_compose_takes_the_settings_of_the_user_and_needs_a_password(tmp_path: Path) -> None:
    done = composed(tmp_path, "compose.yaml", ARCHIPELAGO_PASSWORD="secret-1", ARCHIPELAGO_CONFIG="./mine.toml")
    service = yaml.safe_load(done.stdout)["services"]["init"]
    assert service["command"][-2:] == ["--config", "/config/run.toml"]
    assert "./mine.toml:/config/run.toml:ro" in service["volumes"]
    assert (DEPLOY / "kubernetes/base/run.toml").is_file()  # the default
    done = composed(tmp_path, "compose.yaml")
    assert done.returncode != 0
    assert "ARCHIPELAGO_PASSWORD" in done.stderr


def test_systemd_reads_the_units(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd is not installed")
    for name in units():
        text = (DEPLOY / "systemd" / name).read_text(encoding="utf-8")
        instance = tmp_path / name.replace("@.", "@oslo.")
        instance.write_text(text.replace("/opt/archipelago/bin/archipelago", "/bin/true"))
        done = subprocess.run([program, "verify", str(instance)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_bash_reads_the_scripts() -> None:
    for script in ("slurm/worker.sbatch", "slurm/check_requeue.sh", "check_image.sh"):
        assert subprocess.run(["/bin/bash", "-n", str(DEPLOY / script)]).returncode == 0


def test_sbatch_without_a_url_says_what_is_missing() -> None:
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"}
    script = ["/bin/bash", str(DEPLOY / "slurm/worker.sbatch")]
    for args, missing in (([], "is missing"), (["island"], "ARCHIPELAGO_URL")):
        done = subprocess.run([*script, *args], env=environment, capture_output=True, text=True)
        assert done.returncode not in (0, 75)
        assert len(done.stderr.splitlines()) == 1 and missing in done.stderr
