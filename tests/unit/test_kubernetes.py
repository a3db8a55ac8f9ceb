"""deploy/kubernetes is built by kubectl, valid for Kubernetes and for the Prometheus operator, and
agrees with itself and with the daemon."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from memd import config
from memd.cli import main
from memd.sizes import parse_size
from tests.unit import prometheus_rule

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).parent / "kubernetes"
Resource = dict[str, Any]
KINDS = {
    "base": {
        *("Namespace", "PriorityClass", "ServiceAccount", "DaemonSet", "Service", "ConfigMap"),
        *("NetworkPolicy", "ServiceMonitor", "PrometheusRule"),
    },
    "example": {"Job"},
}
KINDS["token"] = KINDS["base"]


def built(name: str) -> dict[str, Resource]:
    """Resources by kind, of which each has one."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed; `make test` installs it")
    answer = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / name)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    resources = list(yaml.safe_load_all(answer.stdout))
    by_kind = {each["kind"]: each for each in resources}
    assert len(by_kind) == len(resources)
    return by_kind


def check(resource: Resource) -> None:
    """jsonschema.ValidationError where the cluster would refuse it, or ignore a field."""
    schema = SCHEMAS / f"{resource['kind']}.json"
    if schema.exists():
        jsonschema.validate(resource, json.loads(schema.read_text()))
    else:
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["base", "token", "example"])
def test_each_resource_is_valid(name: str) -> None:
    resources = built(name)
    assert set(resources) == KINDS[name]
    for resource in resources.values():
        check(resource)


@pytest.mark.parametrize("kind", sorted(KINDS["base"]))
def test_a_field_that_there_is_not_is_found(kind: str) -> None:
    resource = copy.deepcopy(built("base")[kind])
    resource["metadata"]["label"] = {}
    with pytest.raises(jsonschema.ValidationError):
        check(resource)


@pytest.fixture(params=["base", "token"])
def resources(request: pytest.FixtureRequest) -> dict[str, Resource]:
    return built(request.param)


def container_of(resource: Resource) -> Resource:
    (container,) = resource["spec"]["template"]["spec"]["containers"]
    return dict(container)


def volumes_of(resource: Resource) -> dict[str, Resource]:
    """What is mounted, by path in the container."""
    volumes = {each["name"]: each for each in resource["spec"]["template"]["spec"]["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in container_of(resource)["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    return {path: volumes[name] for path, name in mounts.items()}


def environ_of(resource: Resource) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container_of(resource).get("env", [])}


def settings_of(resources: dict[str, Resource], folder: Path) -> config.Settings:
    """As the daemon in the pod reads them."""
    (file_name,) = resources["ConfigMap"]["data"]
    file = folder / file_name
    file.write_text(resources["ConfigMap"]["data"][file_name])
    command = container_of(resources["DaemonSet"])["command"]
    assert command == ["memd", "serve", "--config", f"/etc/memd/{file_name}"]
    return config.load(flags={}, environ=environ_of(resources["DaemonSet"]), file=file).settings


def test_the_settings_are_the_daemons_and_lie_where_the_pod_has_something(
    resources: dict[str, Resource], tmp_path: Path
) -> None:
    settings = settings_of(resources, tmp_path)
    volumes = volumes_of(resources["DaemonSet"])
    assert volumes[str(settings.socket.parent)]["hostPath"]["type"] == "DirectoryOrCreate"
    for folder in settings.data:
        assert volumes[str(folder)]["hostPath"]["path"] == str(folder)
    assert volumes["/etc/memd"]["configMap"]["name"] == resources["ConfigMap"]["metadata"]["name"]
    if settings.identity == "token":
        assert "configMap" in volumes[str(Path(settings.token_keys).parent)]
    else:
        assert settings.identity == "cgroup"
        assert resources["DaemonSet"]["spec"]["template"]["spec"]["hostPID"] is True


def test_the_pool_fits_into_the_pods_memory(resources: dict[str, Resource], tmp_path: Path) -> None:
    memory = container_of(resources["DaemonSet"])["resources"]
    limit_bytes = parse_size(memory["limits"]["memory"] + "B")
    assert memory["requests"]["memory"] == memory["limits"]["memory"]
    assert settings_of(resources, tmp_path).host + (2 << 30) <= limit_bytes


def test_prometheus_finds_the_metrics_and_nobody_else_does(
    resources: dict[str, Resource], tmp_path: Path
) -> None:
    host, _, port = settings_of(resources, tmp_path).metrics.rpartition(":")
    assert host == "0.0.0.0"
    (container_port,) = container_of(resources["DaemonSet"])["ports"]
    assert container_port["containerPort"] == int(port)
    (service_port,) = resources["Service"]["spec"]["ports"]
    assert service_port["targetPort"] == container_port["name"]
    (endpoint,) = resources["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["port"] == service_port["name"]
    policy = resources["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (rule,) = policy["ingress"]
    assert [each["port"] for each in rule["ports"]] == [int(port)]
    assert "egress" not in policy
    pod = resources["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        resources["DaemonSet"]["spec"]["selector"]["matchLabels"],
        resources["Service"]["spec"]["selector"],
        policy["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= pod.items()
    watched = resources["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert watched.items() <= resources["Service"]["metadata"]["labels"].items()
    # The alerts select job="memd", which is the service's name.
    assert resources["Service"]["metadata"]["name"] == "memd"


def test_the_alerts_are_those_of_prometheus(resources: dict[str, Resource]) -> None:
    assert prometheus_rule.PAGE.read_text() == prometheus_rule.generate(), "make regenerate"
    rules = yaml.safe_load(prometheus_rule.RULES.read_text())
    assert resources["PrometheusRule"]["spec"] == rules


def test_the_pod_has_no_rights_but_to_lock_memory(resources: dict[str, Resource]) -> None:
    pod = resources["DaemonSet"]["spec"]["template"]["spec"]
    assert not {"hostIPC", "hostNetwork"} & set(pod)
    assert pod["automountServiceAccountToken"] is False
    rights = container_of(resources["DaemonSet"])["securityContext"]
    assert rights["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["allowPrivilegeEscalation"] is False
    assert pod["priorityClassName"] == resources["PriorityClass"]["metadata"]["name"]


def test_the_guide_names_the_alert_that_fires_under_the_profile_of_the_base(
    resources: dict[str, Resource],
) -> None:
    rights = container_of(resources["DaemonSet"])["securityContext"]
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
    guide = (FOLDER.parents[1] / "docs" / "service.md").read_text(encoding="utf-8")
    about = guide.partition("\n## Under Kubernetes\n")[2].partition("\n## ")[0]
    assert "RuntimeDefault" in about
    assert "`MemdIoFallback` fires" in about


def test_a_node_lets_go_of_its_daemon_last_and_slowly(resources: dict[str, Resource]) -> None:
    """State in memory goes to disk before the pod ends; and while one node's ends, others serve."""
    daemons = resources["DaemonSet"]["spec"]
    pod = daemons["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 120
    assert daemons["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1}
    assert ("nvidia.com/gpu", "Exists") in [
        (each["key"], each["operator"]) for each in pod["tolerations"]
    ]
    assert resources["PriorityClass"]["value"] > 0


def test_probes_are_commands_that_there_are(
    resources: dict[str, Resource], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config, "DEFAULT_FILE", tmp_path / "none.toml")
    monkeypatch.setenv("MEMD_ADDRESS", f"unix://{tmp_path}/memd.sock")
    container = container_of(resources["DaemonSet"])
    for probe, wanted in (
        ("startupProbe", ["--probe"]),
        ("readinessProbe", ["--probe"]),
        ("livenessProbe", ["--probe=live"]),
    ):
        program, *arguments = container[probe]["exec"]["command"]
        assert (program, arguments) == ("memd", ["status", *wanted])
        answer = CliRunner().invoke(main, arguments)
        assert answer.exit_code == 4, "no daemon answers here, and the command is understood"


def test_the_example_reaches_the_daemon(resources: dict[str, Resource], tmp_path: Path) -> None:
    job = built("example")["Job"]
    settings = settings_of(resources, tmp_path)
    daemon, pod = resources["DaemonSet"], job["spec"]["template"]["spec"]
    assert environ_of(job)["MEMD_ADDRESS"] == f"unix://{settings.socket}"
    shared = str(settings.socket.parent)
    theirs, ours = volumes_of(job)[shared], volumes_of(daemon)[shared]
    assert theirs["hostPath"]["path"] == ours["hostPath"]["path"]
    group = container_of(daemon)["securityContext"]["runAsGroup"]
    assert pod["securityContext"]["supplementalGroups"] == [group]
    assert pod["nodeSelector"] == daemon["spec"]["template"]["spec"]["nodeSelector"]
    token = Path(environ_of(job)["MEMD_TOKEN_FILE"])
    (source,) = volumes_of(job)[str(token.parent)]["projected"]["sources"]
    assert source["serviceAccountToken"]["path"] == token.name
    assert source["serviceAccountToken"]["audience"] == settings.token_audience
