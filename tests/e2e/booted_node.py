"""A root of debootstrap with a real systemd, where the release before is installed as its own
docs/service.md says, and upgraded to today's wheel.

The daemon, its units and settings, README's script and the trainer's client come from the release
before; the client trains on under today's daemon. Prometheus's rules and the program that trains
are today's."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.compat.built_release import pins_of, source_of, wheel_of
from tests.compat.releases import Release, newest_that_builds
from tests.e2e.higher_version import raise_wheel
from tests.e2e.node import PROMETHEUS, ROOT, Node, configuration_of_prometheus
from tests.soak.booted_root import Failure, run
from tests.soak.debian_package import PYTHON, SIZES, SYSTEM, suite
from tests.soak.packaged_trainer import Trained, copy_programs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.soak.booted_root import System

FOLDER = ROOT / "build" / "operator"
SRV = FOLDER / "srv"
SOCKET = "/run/memd/memd.sock"
USER = "alice"
TRAINING = "/opt/train"
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "cpp", "ld", "as", "make", "cmake", "ninja")
# Each environment is ready after this step alone, which needs no network.
PIP = "pip install --quiet --disable-pip-version-check --no-index --find-links /srv/wheelhouse"
PINS = "constraints.txt"
# Its own mounts and processes, which end with it.
APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True, kw_only=True, slots=True)
class Upgrade:
    release: Release
    before: Path
    # Its version is higher, so that pip installs it over the other.
    today: Path

    @property
    def versions(self) -> tuple[str, str]:
        before, today = (wheel.name.split("-")[1] for wheel in (self.before, self.today))
        return before, today


class BootedNode(Node):
    prometheus = "http://127.0.0.1:9090"
    daemons_user = ("runuser", "-u", "memd", "--")

    def __init__(self, system: System, upgrade: Upgrade) -> None:
        user = ("runuser", "-u", USER, "--")
        super().__init__(
            system,
            memd=("memd",),
            socket=SOCKET,
            trained=Trained(
                folder=f"/home/{USER}/run",
                python=f"{TRAINING}/bin/python",
                user=user,
                arguments=("step",),
            ),
        )
        self._upgrade = upgrade

    @property
    def readme(self) -> Path:
        return source_of(self._upgrade.release) / "README.md"

    def install(self) -> str:
        system, release = self.system, self._upgrade.release
        version = self._upgrade.versions[0]
        memd = f"{PIP} --constraint /srv/{PINS}"
        if found := [name for name in COMPILERS if not system.fails("which", name)]:
            raise Failure(f"nothing may be compiled, and the root has {found}")
        if len(system.do("cat", "/proc/net/route").splitlines()) > 1:
            raise Failure("the root has a route to a network")
        system.do("useradd", "--create-home", USER)
        system.do(*self.trained.user, "mkdir", self.trained.folder)
        install = f"{memd} 'memd[server]=={version}'"
        system.do("bash", "-euxc", _instructions(source_of(release), install))
        system.do("python3", "-m", "venv", TRAINING)
        system.do("bash", "-c", f"{TRAINING}/bin/{memd} 'memd[demo]=={version}' torch")
        said = system.do("memd", "--version").strip()
        commit = release.commit[:12]
        return (
            f"{said} of {commit}, {release.name}, from a wheelhouse, without compiler and network"
        )

    def start(self) -> None:
        self.wait_until_ready()
        if self.system.do("systemctl", "is-active", "memd.service").strip() != "active":
            raise Failure("systemd does not call the service active")

    def restart(self) -> None:
        self.system.do("systemctl", "restart", "memd.service")
        self.wait_until_ready()

    def upgrade(self) -> str:
        version = self._upgrade.versions[1]
        self.system.do("bash", "-c", f"/opt/memd/bin/{PIP} 'memd[server]=={version}'")
        self.restart()
        return version

    def daemon(self) -> int:
        show = ("systemctl", "show", "--property=MainPID", "--value", "memd.service")
        return int(self.system.do(*show))

    def log(self) -> str:
        journal = ("journalctl", "--no-pager", "--output=cat", "--unit", "memd.service")
        return "\n".join(self.system.lines_of(*journal))

    def start_prometheus(self) -> None:
        folder = self.system.root / "etc" / "prometheus"
        configuration = configuration_of_prometheus("127.0.0.1:9464")
        (folder / "prometheus.yml").write_text(configuration, encoding="utf-8")
        shutil.copy(PROMETHEUS / "rules.yml", folder)
        self.system.do("promtool", "check", "config", "/etc/prometheus/prometheus.yml")
        self.system.do("systemctl", "restart", "prometheus")


def _instructions(source: Path, install: str) -> str:
    """Those of docs/service.md, with a wheel in place of the sources and sizes of this trial."""
    guide = (source / "docs" / "service.md").read_text(encoding="utf-8")
    found = re.search(r"^## Under systemd$.*?^```\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    if found is None:
        raise Failure("docs/service.md has no commands for systemd")
    commands, count = re.subn(r"pip install '\.\[server\]'", install, found[1])
    if count != 1:
        raise Failure("docs/service.md installs memd[server] otherwise than this trial expects")
    return "cd /srv\n" + commands


# --- what is booted -------------------------------------------------------------------------------


def build_upgrade() -> Upgrade:
    release = newest_that_builds("wheel")
    before = wheel_of(release)
    run(ROOT / "deploy" / "wheels" / "build.sh", "x86_64", env={"PYTHONS": PYTHON})
    (wheel,) = (ROOT / "dist").glob("memd-*-cp311-cp311-*_x86_64.whl")
    return Upgrade(release=release, before=before, today=raise_wheel(wheel, FOLDER))


def make_root(upgrade: Upgrade) -> Path:
    """Empty but for Debian's packages; beside it /srv with the wheelhouse."""
    base, root = FOLDER / "base", FOLDER / "root"
    if not (base / "made").exists():
        shutil.rmtree(base, ignore_errors=True)
        include = f"--include={','.join((*SYSTEM, 'prometheus'))}"
        run(*APART, "debootstrap", "--variant=minbase", include, suite(), base)
        (base / "made").touch()
    shutil.rmtree(root, ignore_errors=True)
    run("cp", "--archive", base, root)
    sizes = root / "etc" / "systemd" / "system" / "memd.service.d" / "sizes.conf"
    sizes.parent.mkdir(parents=True)
    sizes.write_text(SIZES)
    fill_wheelhouse(upgrade)
    source = source_of(upgrade.release)
    shutil.rmtree(SRV / "deploy", ignore_errors=True)
    shutil.rmtree(SRV / "trial", ignore_errors=True)
    shutil.copytree(source / "deploy" / "systemd", SRV / "deploy" / "systemd")
    shutil.copy(source / "deploy" / "memd.toml", SRV / "deploy")
    copy_programs(SRV / "trial")
    return root


def fill_wheelhouse(upgrade: Upgrade) -> None:
    """All that both sides ask for: the one before with the versions that it pins."""
    house, pins = SRV / "wheelhouse", SRV / PINS
    house.mkdir(parents=True, exist_ok=True)
    pins.write_text("".join(f"{each}\n" for each in pins_of(upgrade.release)), encoding="utf-8")
    for old in house.glob("memd-*.whl"):
        old.unlink()
    torch = os.environ.get("TORCH") or run(PYTHON, ROOT / "deploy" / "setup" / "choose_torch.py")
    index = os.environ.get("TORCH_INDEX")
    extra = ("--extra-index-url", index) if index else ()
    pip = (PYTHON, "-m", "pip", "--disable-pip-version-check", "download", "--quiet")
    options = ("--only-binary", ":all:", "--dest", house, "--find-links", house, *extra)
    before = (*options, "--constraint", pins)
    run(*pip, *before, f"{upgrade.before}[demo,server]", torch.strip())
    run(*pip, *options, f"{upgrade.today}[server]")
