"""deploy/container agrees with itself, with the daemon and with what else deploy/ ships. That the
images are built and work is what `python -m tests.soak.containers` shows."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from click.testing import CliRunner

import memd
from memd import config
from memd.cli import main

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FOLDER = DEPLOY / "container"
Service = dict[str, Any]
# Of containers-common 0.50.1's default profile, with its keys in order.
DEFAULT_PROFILE = "86fbb3dbde22fd226feb9cfd62252ed8aee3fc736873a2d57d25e69a8d45de55"
IO_URING = ["io_uring_enter", "io_uring_register", "io_uring_setup"]
MEMD_ID = "2600"


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions and what follows them, by stage; lines that go on are joined."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Containerfile").read_text(), flags=re.MULTILINE)
    text = re.sub(r"\\\n\s*", "", text)
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in filter(None, text.splitlines()):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            name = rest.rpartition(" AS ")[2]
        found.setdefault(name, []).append((instruction, rest))
    return found


def values(stage: str, instruction: str) -> list[str]:
    return [rest for each, rest in stages()[stage] if each == instruction]


def environ(stage: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for line in values(stage, "ENV") for pair in line.split())


def compose() -> dict[str, Service]:
    services: dict[str, Service] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    return services


def mounts(service: Service) -> dict[str, str]:
    """What is mounted, by path in the container."""
    pairs = [re.fullmatch(r"(.+?):(/[^:]+)(?::ro)?", each) for each in service["volumes"]]
    assert all(pairs)
    return {pair[2]: pair[1] for pair in pairs if pair}


def default_of(text: str) -> str:
    """As the engine reads `${NAME:-default}` where NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_what_serves_and_what_trains_has_no_compiler_and_is_not_root() -> None:
    for stage, user in (("daemon", MEMD_ID), ("trainer", "1000")):
        assert values(stage, "FROM") == [f"python AS {stage}"]
        assert values(stage, "USER") == [user]
        (copied,) = values(stage, "COPY")
        assert copied == f"--from={stage}-environment /opt/memd /opt/memd"
        (users,) = [line for line in values(stage, "RUN") if "useradd" in line]
        assert f"groupadd --gid {MEMD_ID} memd" in users
        assert f"useradd --uid {user} " in users
    (installed,) = values("python", "RUN")
    assert "install -y --no-install-recommends python3 &&" in installed


def test_the_volumes_are_where_the_daemon_writes() -> None:
    settings = config.load(flags={}, environ=environ("daemon"), file=Path("/dev/null")).settings
    folders = [str(settings.socket.parent), *map(str, settings.data)]
    (volumes,) = values("daemon", "VOLUME")
    assert json.loads(volumes) == folders
    (made,) = [line for line in values("daemon", "RUN") if "useradd" in line]
    for folder in folders:
        assert re.search(rf"install -d -o memd -g memd -m 07[05]0 {folder}\b", made)
    assert values("daemon", "EXPOSE") == [settings.metrics.rpartition(":")[2]]
    assert settings.holder_seconds == 0


def test_the_image_starts_the_daemon_and_asks_whether_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (entry,), (command,) = values("daemon", "ENTRYPOINT"), values("daemon", "CMD")
    assert json.loads(entry) + json.loads(command) == ["memd", "serve"]
    (check,) = values("daemon", "HEALTHCHECK")
    program, *arguments = json.loads(check.partition(" CMD ")[2])
    assert (program, arguments) == ("memd", ["status", "--probe"])
    monkeypatch.setattr(config, "DEFAULT_FILE", tmp_path / "none.toml")
    monkeypatch.setenv("MEMD_ADDRESS", f"unix://{tmp_path}/memd.sock")
    answer = CliRunner().invoke(main, arguments)
    assert answer.exit_code == 4, "no daemon answers here, and the command is understood"


def test_all_that_is_copied_is_in_the_context_and_there() -> None:
    ignored = (ROOT / ".containerignore").read_text().splitlines()
    assert "*" in ignored
    context = {line[1:] for line in ignored if line.startswith("!")}
    copied = {source for line in values("build", "COPY") for source in line.split()[:-1]}
    assert copied == context
    for name in copied:
        assert (ROOT / name).exists()


def test_extras_are_those_of_the_distribution() -> None:
    text = (FOLDER / "Containerfile").read_text()
    wanted = {
        extra for found in re.findall(r"\.whl\)\[([\w,]+)\]", text) for extra in found.split(",")
    }
    assert wanted == {"server", "token", "client"}
    distribution = (ROOT / "pyproject.toml").read_text()
    for extra in wanted:
        assert f"\n{extra} = [" in distribution


def test_the_profile_differs_from_the_default_one_by_io_uring_alone() -> None:
    profile = json.loads((FOLDER / "seccomp.json").read_text())
    *others, last = profile["syscalls"]
    assert last["names"] == IO_URING
    assert last["action"] == "SCMP_ACT_ALLOW"
    assert not any(last[name] for name in ("args", "includes", "excludes"))
    profile["syscalls"] = others
    said = json.dumps(profile, sort_keys=True).encode()
    assert hashlib.sha256(said).hexdigest() == DEFAULT_PROFILE
    assert not set(IO_URING) & {name for each in others for name in each["names"]}


def test_compose_names_images_and_files_that_there_are() -> None:
    services = compose()
    assert set(services) == {"memd", "trainer", "prometheus", "grafana"}
    for name, image, stage in (("memd", "memd", "daemon"), ("trainer", "memd-trainer", "trainer")):
        assert services[name]["image"] == f"{image}:{memd.__version__}"
        build = services[name]["build"]
        assert build["target"] == stage
        assert (FOLDER / build["context"] / build["dockerfile"]).samefile(FOLDER / "Containerfile")
    volumes = yaml.safe_load((FOLDER / "compose.yaml").read_text())["volumes"]
    for service in services.values():
        for source in map(default_of, mounts(service).values()):
            assert source in volumes or (FOLDER / source).is_file(), source


def test_compose_gives_the_daemon_what_it_needs_and_no_more() -> None:
    daemon = compose()["memd"]
    assert daemon["read_only"] is True
    assert daemon["cap_drop"] == ["ALL"]
    assert "cap_add" not in daemon
    assert daemon["ulimits"]["memlock"] == -1
    assert daemon["security_opt"] == ["no-new-privileges:true", "seccomp:./seccomp.json"]
    assert (FOLDER / "seccomp.json").is_file()
    (volumes,) = values("daemon", "VOLUME")
    assert list(mounts(daemon)) == json.loads(volumes)
    command, *flags = map(default_of, daemon["command"])
    assert command == "serve"
    given = {name[2:]: value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    settings = config.load(flags=given, environ=environ("daemon"), file=Path("/dev/null")).settings
    assert settings.metrics == "0.0.0.0:9464"


def test_the_trainer_reaches_the_daemon_through_its_sockets_alone() -> None:
    services = compose()
    trainer = services["trainer"]
    assert trainer["network_mode"] == "none"
    shared = str(config.Settings().socket.parent)
    assert mounts(trainer)[shared] == mounts(services["memd"])[shared] == "sockets"
    assert environ("trainer")["MEMD_ADDRESS"] == environ("daemon")["MEMD_ADDRESS"]
    assert trainer["depends_on"]["memd"]["condition"] == "service_healthy"
    # The script that it runs goes on where its job stands.
    assert trainer["restart"] == "on-failure"


class Plain(ast.NodeTransformer):
    """A script without what it prints, imports one by one, and constants in their places."""

    def __init__(self) -> None:
        self._constants: dict[str, ast.expr] = {}

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        (target,) = node.targets
        if isinstance(target, ast.Name) and target.id.isupper():
            self._constants[target.id] = node.value
            return None
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._constants.get(node.id, node)

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        return [ast.Import([name]) for name in node.names]

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        text = ast.unparse(node)
        return None if text.startswith(("print(", "'")) else self.generic_visit(node)


def test_the_trainers_script_is_the_first_of_the_guide() -> None:
    guide = (FOLDER.parents[1] / "docs" / "training.md").read_text()
    script = re.search(r"```python\n(.*?)```", guide, re.DOTALL)
    assert script is not None
    plain = [
        ast.unparse(Plain().visit(ast.parse(text)))
        for text in (script[1], (FOLDER / "train.py").read_text())
    ]
    assert plain[0] == plain[1]
    assert "session.resume()" in plain[0]


def test_prometheus_asks_the_daemons_container_as_it_would_ask_a_node() -> None:
    ours = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    theirs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    wanted = copy.deepcopy(theirs)
    wanted["scrape_configs"][0]["static_configs"] = [{"targets": ["memd:9464"]}]
    assert ours == wanted
    services = compose()
    found = mounts(services["prometheus"])
    assert (FOLDER / found["/etc/prometheus/rules.yml"]).samefile(DEPLOY / "prometheus/rules.yml")
    assert services["prometheus"]["networks"] == services["memd"]["networks"]


def test_grafana_has_the_dashboard_and_its_source() -> None:
    grafana = compose()["grafana"]
    found = mounts(grafana)
    provided = {
        path: yaml.safe_load((FOLDER / source).read_text())
        for path, source in found.items()
        if path.startswith("/etc/grafana/provisioning/")
    }
    sources = provided["/etc/grafana/provisioning/datasources/memd.yml"]["datasources"]
    assert [each["type"] for each in sources] == ["prometheus"]
    assert sources[0]["url"] == "http://prometheus:9090"
    (provider,) = provided["/etc/grafana/provisioning/dashboards/memd.yml"]["providers"]
    (dashboard,) = [path for path in found if path.startswith(provider["options"]["path"] + "/")]
    assert (FOLDER / found[dashboard]).samefile(DEPLOY / "grafana" / "memd.json")


def test_kubernetes_runs_the_same_image() -> None:
    base = yaml.safe_load((DEPLOY / "kubernetes/base/kustomization.yaml").read_text())
    (image,) = base["images"]
    assert f"{image['newName']}:{image['newTag']}" == compose()["memd"]["image"]
    daemon_set = yaml.safe_load((DEPLOY / "kubernetes/base/daemon-set.yaml").read_text())
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["runAsGroup"] == int(MEMD_ID)
