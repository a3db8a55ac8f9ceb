"""Installs the Debian package under a real systemd, without network, and trains through it all.

A root of debootstrap is booted by systemd-nspawn. The package of the release before is installed,
which that commit's own scripts built; a trainer of another user, with that release's client, runs
while the service is restarted, killed, upgraded to today's package, and killed once more; its
losses and its state at the end have the bits of the same training in memory. Then the package is
removed and purged, and every path that is left is named.

Run as root: python -m tests.soak.debian_package [--json FILE]. `make try-deb` does so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.compat.built_release import package_of, wheel_of
from tests.compat.releases import newest_that_builds
from tests.soak.booted_root import CLEAN, BootedRoot, Failure, booted, run, wait
from tests.soak.packaged_trainer import Trainer, copy_programs, user_who_trains

if TYPE_CHECKING:
    from tests.compat.releases import Release

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "debian" / "trial"
PYTHON = "/usr/bin/python3"
SYSTEM = ("systemd-sysv", "dbus", "python3", "python3-venv", "man-db", "bash-completion")
TOOLS = {"debootstrap": "debootstrap", "systemd-nspawn": "systemd-container"}
# What users of smaller machines write too, before they install.
SIZES = "[Service]\nEnvironment=MEMD_HOST=256MiB MEMD_NVME=1GiB\n"
# An administrator's own setting.
FRAGMENT, FRAGMENT_TEXT = "/etc/memd/conf.d/site.toml", 'scrub = "8MiB"'
PROBE = ("memd", "status", "--probe")
TRAINER = "alice"
UNITS = ("memd.service", "memd.socket")
# What a system that runs writes by itself, and what dpkg and apt note of each package.
OWN_BUSINESS = re.compile(
    r"/(proc|sys|dev|srv|tmp|root)(/|$)|/var/(log|cache|tmp)/|/var/lib/(apt|dpkg|systemd|dbus)/"
    r"|/run/|/etc/(passwd|group|shadow|gshadow|subuid|subgid)-?$|/etc/\.pwd\.lock$"
    r"|/etc/(machine-id|hostname|resolv\.conf|ld\.so\.cache)$|/home/"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    before: str
    package: str
    package_bytes: int
    installed_kib: int
    seconds_from_install_to_ready: float
    steps: int
    losses_different: int
    state_different: bool
    sessions_fenced: int
    daemons: int
    left_after_purge: list[str]

    @property
    def differences(self) -> int:
        return (
            self.losses_different
            + self.state_different
            + self.sessions_fenced
            + len(self.left_after_purge)
        )


# --- what is tried, and where ---------------------------------------------------------------------


def build_package() -> Path:
    """Today's; the release before may have the same version, so this is revision 2 of it."""
    run(ROOT / "deploy" / "debian" / "build.sh", env={"REVISION": "2"})
    (package,) = (ROOT / "dist").glob("memd_*-2_*.deb")
    return package


def suite() -> str:
    found = re.search(
        r"^VERSION_CODENAME=(\w+)$", Path("/etc/os-release").read_text(), re.MULTILINE
    )
    if found is None:
        raise Failure("a Debian package is tried on the Debian that it is built on")
    return found[1]


def in_root(root: Path, *command: str) -> None:
    run("unshare", "--net", "--", "chroot", root, *CLEAN, *command)


def make_base() -> Path:
    """A root with systemd and Python; made once."""
    base = FOLDER / "base"
    if (base / "made").exists():
        return base
    shutil.rmtree(base, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    say(f"debootstrap of {suite()}")
    include = f"--include={','.join(SYSTEM)}"
    run("debootstrap", "--variant=minbase", include, suite(), base)
    (base / "made").touch()
    return base


def make_environment(base: Path, release: Release) -> None:
    """What trains, with the release's client; made once for each."""
    made = base / "srv" / "trains"
    if made.exists() and made.read_text() == release.commit:
        return
    shutil.rmtree(base / "srv" / "train", ignore_errors=True)
    house = base / "srv" / "wheelhouse"
    shutil.rmtree(house, ignore_errors=True)
    torch = os.environ.get("TORCH") or run(PYTHON, ROOT / "deploy" / "setup" / "choose_torch.py")
    say(f"downloading what trains: {torch.strip()}")
    pip = (PYTHON, "-m", "pip", "--disable-pip-version-check")
    options = ("--quiet", "--only-binary", ":all:", "--dest", house)
    index = os.environ.get("TORCH_INDEX")
    extra = ("--extra-index-url", index) if index else ()
    run(*pip, "download", *options, *extra, f"{wheel_of(release)}[demo]", torch.strip())
    in_root(base, "python3", "-m", "venv", "/srv/train")
    inner = ("/srv/train/bin/pip", "install", "--quiet", "--no-index", "--find-links")
    in_root(base, *inner, "/srv/wheelhouse", "memd[demo]", torch.strip())
    shutil.rmtree(house)
    made.write_text(release.commit)


def make_root(release: Release, packages: tuple[Path, Path]) -> Path:
    """A copy of the base, without what lies in /srv, which is mounted there."""
    base, root = make_base(), FOLDER / "root"
    make_environment(base, release)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    copied = [path for path in base.iterdir() if path.name not in ("srv", "made")]
    run("cp", "--archive", "--target-directory", root, *copied)
    trial = base / "srv" / "trial"
    shutil.rmtree(trial, ignore_errors=True)
    copy_programs(trial)
    for package in packages:
        shutil.copy(package, trial)
    sizes = root / "etc" / "systemd" / "system" / "memd.service.d" / "sizes.conf"
    sizes.parent.mkdir(parents=True)
    sizes.write_text(SIZES)
    return root


def say(text: str) -> None:
    print(text, flush=True)


# --- the trial ------------------------------------------------------------------------------------


class Service:
    """What systemd and memd say of the daemon; each of its processes once."""

    def __init__(self, system: BootedRoot) -> None:
        self._system = system
        self.processes: list[str] = []

    def check(self, what: str) -> None:
        """It is another process than before, it is active, and it has what jobs keep in memory."""
        system = self._system
        wait(lambda: not system.fails(*PROBE), f"memd is not ready after {what}")
        state = dict(
            line.split("=", 1)
            for line in system.do(
                *("systemctl", "show", "memd.service", "--property"),
                "ActiveState,SubState,MainPID,NRestarts,NFileDescriptorStore,Result,UnitFileState",
            ).splitlines()
        )
        if (state["ActiveState"], state["UnitFileState"]) != ("active", "enabled"):
            raise Failure(f"after {what}: {state}")
        if state["MainPID"] in self.processes:
            raise Failure(f"{what} did not change the daemon's process {state['MainPID']}")
        self.processes.append(state["MainPID"])
        say(
            f"{what}: active ({state['SubState']}), process {state['MainPID']},"
            f" {state['NFileDescriptorStore']} descriptors with systemd"
        )

    def check_takeovers(self) -> None:
        """Each process but the first has the memory of the one before."""
        journal = self._system.do("journalctl", "--no-pager", "--unit", "memd.service")
        found = [line for line in journal.splitlines() if "is taken over" in line]
        if len(found) != len(self.processes) - 1:
            raise Failure(f"{len(self.processes)} daemons, and memory taken over: {found}")
        say(f"memory taken over {len(found)} times: {found[-1].partition('event=')[2]}")

    def socket(self) -> str:
        """Its number tells whether it is the same."""
        return self._system.do("stat", "--format=%i %U:%G %a", "/run/memd/attach.sock").strip()


def install(system: BootedRoot, package: Path) -> float:
    began = time.monotonic()
    local = f"/srv/trial/{package.name}"
    system.do("apt-get", "install", "--yes", "--no-install-recommends", local)
    wait(lambda: not system.fails(*PROBE), "memd is not ready")
    took = time.monotonic() - began
    version = system.do("dpkg-query", "--show", "--showformat=${Version}", "memd").strip()
    if package.name.split("_")[1] != version:
        raise Failure(f"{version} is installed, and not {package.name}")
    say(f"apt-get install {package.name}: ready after {took:.1f} s")
    return took


def check_commands(system: BootedRoot) -> None:
    """All that an administrator finds after the installation."""
    say(system.do("memd", "--version").strip())
    say(system.do("memd", "status").strip())
    system.do("systemctl", "status", "--no-pager", *UNITS)
    system.do("memd", "doctor")
    system.do("memd", "config")
    system.do("man", "--where", "memd", "memd-job-list")
    completion = ". /usr/share/bash-completion/completions/memd; complete -p memd"
    system.do("bash", "-c", completion)
    system.do("ls", "/usr/share/doc/memd/README.md", "/etc/memd/memd.toml")
    check_files(system)
    # The next daemon reads it, and a purge deletes it.
    system.do("mkdir", "/etc/memd/conf.d")
    system.do("bash", "-c", f"echo '{FRAGMENT_TEXT}' >{FRAGMENT}")
    if FRAGMENT not in system.do("memd", "config"):
        raise Failure(f"memd does not read {FRAGMENT}")
    # Bob is in no group of memd.
    system.do("useradd", "bob")
    if not system.fails("runuser", "-u", "bob", "--", "memd", "status"):
        raise Failure("a user outside the group memd is answered")


def check_files(system: BootedRoot) -> None:
    if changed := system.do("dpkg", "--verify", "memd"):
        raise Failure(f"dpkg finds other files than it installed:\n{changed}")


def kill(system: BootedRoot) -> None:
    system.do("systemctl", "kill", "--signal=KILL", "--kill-whom=main", "memd")


def check_removed(system: BootedRoot) -> None:
    """The configuration and the jobs' state stay until a purge."""
    system.do("apt-get", "remove", "--yes", "memd")
    if not system.fails("systemctl", "is-active", "memd.service"):
        raise Failure("the service runs after its package was removed")
    system.do("ls", "/etc/memd/memd.toml", FRAGMENT, "/var/lib/memd/memd.volume")


def paths_of(system: BootedRoot) -> set[str]:
    """All but what a running system writes; what is called memd counts wherever it lies."""
    found = system.lines_of("find", "/", "/run", "-xdev")
    return {path for path in found if "memd" in path or OWN_BUSINESS.search(path) is None}


def purge(system: BootedRoot, before: set[str]) -> list[str]:
    system.do("apt-get", "purge", "--yes", "memd")
    listed = system.do("systemctl", "list-unit-files", "--no-legend", "memd*", may_fail=True)
    left = sorted(paths_of(system) - before)
    left += [f"unit {line}" for line in listed.splitlines()]
    say(f"purge: {len(left)} paths and units left{': ' if left else ''}{', '.join(left)}")
    say(f"the user stays: {system.do('getent', 'passwd', 'memd').strip()}")
    return left


def trial(log: Path) -> Outcome:
    release = newest_that_builds("package")
    package = build_package()
    before = package_of(release)
    say(f"{before.name} of {release.commit[:12]}, {release.name}; then {package.name} of today")
    root = make_root(release, (before, package))
    with booted(root, log, srv=FOLDER / "base" / "srv") as system:
        paths = paths_of(system)
        took = install(system, before)
        check_commands(system)
        service = Service(system)
        service.check("installed")
        socket = service.socket()
        trainer = Trainer(system, user_who_trains(system, TRAINER))
        trainer.start()
        trainer.wait_for_steps()
        say(system.do("memd", "job", "list").strip())
        system.do("systemctl", "restart", "memd")
        trainer.wait_for_steps()
        service.check("restart")
        kill(system)
        trainer.wait_for_steps()
        service.check("kill -9")
        install(system, package)
        trainer.wait_for_steps()
        service.check("upgrade")
        check_files(system)
        kill(system)
        trainer.wait_for_steps()
        service.check("kill -9 of today's")
        if service.socket() != socket:
            raise Failure(f"the attach socket was {socket} and is {service.socket()}")
        compared = trainer.finish()
        say(f"training: {compared}")
        service.check_takeovers()
        check_removed(system)
        left = purge(system, paths)
    return Outcome(
        before=f"{before.name} of {release.commit}",
        package=package.name,
        package_bytes=package.stat().st_size,
        installed_kib=int(run("dpkg-deb", "--field", package, "Installed-Size")),
        seconds_from_install_to_ready=round(took, 1),
        steps=compared["steps"],
        losses_different=compared["losses_different"],
        state_different=bool(compared["state_different"]),
        sessions_fenced=compared["sessions_fenced"],
        daemons=len(service.processes),
        left_after_purge=left,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("roots and namespaces need root: sudo make try-deb")
    if missing := [package for tool, package in TOOLS.items() if shutil.which(tool) is None]:
        sys.exit(f"install these packages: apt-get install {' '.join(missing)}")
    log = FOLDER / "debian-package.log"
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        outcome = trial(log)
    except Failure as failure:
        sys.exit(f"FAILED: {failure}")
    text = json.dumps({**asdict(outcome), "differences": outcome.differences}, indent=2)
    say(text)
    say(f"all that was said: {log}")
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 1 if outcome.differences else 0


if __name__ == "__main__":
    sys.exit(main())
