"""The Debian package: what is in its sources, and in dist/ what `make deb` has built."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from memd import __version__, config

ROOT = Path(__file__).parents[2]
DEBIAN = ROOT / "deploy" / "debian"
SYSTEMD = ROOT / "deploy" / "systemd"
BUILT = sorted((ROOT / "dist").glob(f"memd_{__version__}-*.deb"))
# As debhelper calls them, and as they are called where they lie.
SYSTEMD_FILES = {
    "memd.service": ("memd.service", "lib/systemd/system/memd.service"),
    "memd.socket": ("memd.socket", "lib/systemd/system/memd.socket"),
    "memd.sysusers": ("memd.sysusers.conf", "usr/lib/sysusers.d/memd.conf"),
    "memd.tmpfiles": ("memd.tmpfiles.conf", "usr/lib/tmpfiles.d/memd.conf"),
}
SCRIPTS = ("memd.postinst", "memd.prerm", "memd.postrm")
# Those that a package of memd[server,token] has to have, with all that they need.
LOCK = (DEBIAN / "requirements.txt").read_text(encoding="utf-8")
LOCKED = dict(re.findall(r"^([a-z-]+)==(\S+)", LOCK, re.MULTILINE))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that dpkg-buildpackage works in, without the wheels."""
    folder = tmp_path_factory.mktemp("package") / "tree"
    environ = {**os.environ, "REVISION": "7"}
    subprocess.run([DEBIAN / "build.sh", "tree", folder], check=True, env=environ)
    return folder


@pytest.fixture(scope="module")
def commands(tree: Path) -> list[str]:
    """What debian/rules runs to fill the package."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    plan = subprocess.run(
        ["make", "--dry-run", "--file", "debian/rules", "override_dh_auto_install"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    )
    return plan.stdout.replace("\\\n", " ").splitlines()


def test_the_version_is_that_of_the_project(tree: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first = (tree / "debian" / "changelog").read_text(encoding="utf-8").splitlines()[0]
    assert re.fullmatch(rf"memd \({re.escape(project['version'])}-7\) \w+; urgency=medium", first)


@pytest.mark.parametrize("name", SYSTEMD_FILES)
def test_debhelper_gets_the_files_of_deploy_systemd(tree: Path, name: str) -> None:
    source, _ = SYSTEMD_FILES[name]
    packed = tree / "debian" / name
    assert packed.read_bytes() == (SYSTEMD / source).read_bytes()
    assert not packed.is_symlink()


def test_no_file_of_deploy_systemd_is_forgotten() -> None:
    packed = {source for source, _ in SYSTEMD_FILES.values()}
    assert {path.name for path in SYSTEMD.iterdir()} == packed


def test_the_build_asks_no_network(commands: list[str]) -> None:
    installs = [line for line in commands if " -m pip " in line]
    assert len(installs) == 2
    for line in installs:
        assert "PIP_CONFIG_FILE=/dev/null" in line
        assert {"--isolated", "--no-index", "--no-deps"} <= set(line.split())
    assert "--require-hashes" in installs[0].split()
    asking = re.compile(r"\b(curl|wget|apt|apt-get|git|https?:)|pip download")
    assert [line for line in commands if asking.search(line)] == []


def test_every_wheel_is_pinned_with_hashes() -> None:
    entries = re.split(r"^(?=[a-z])", LOCK, flags=re.MULTILINE)[1:]
    assert len(entries) == len(LOCKED) > 10
    for entry in entries:
        assert re.match(r"[a-z-]+==\S+( ; [^\n]+)? \\\n", entry), entry
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry


def test_the_pinned_versions_are_what_the_server_and_its_tokens_ask_for() -> None:
    project: Any = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["server"], extras["token"][-1]]
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(LOCKED[requirement.name]), requirement
    assert not {"torch", "numpy"} & LOCKED.keys()


def test_the_first_configuration_has_the_sizes_of_the_defaults(
    tree: Path, commands: list[str]
) -> None:
    """The example's are those of a large machine; the service starts as it is installed."""
    (command,) = [line for line in commands if line.endswith("debian/memd/etc/memd/memd.toml")]
    file = tree / "debian" / "memd" / "etc" / "memd" / "memd.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, cwd=tree, shell=True, check=True)
    configured = config.load(flags={}, environ={}, file=file)
    example = config.load(flags={}, environ={}, file=ROOT / "deploy" / "memd.toml")
    assert configured.origins == dict(example.origins) | {
        name: str(file) for name, origin in example.origins.items() if origin.endswith(".toml")
    }
    defaults = config.Settings()
    assert (configured.settings.host, configured.settings.nvme) == (defaults.host, defaults.nvme)


def test_the_packaged_service_reads_fragments_beside_its_configuration(
    tree: Path, commands: list[str]
) -> None:
    """Its own command line and environment, with the package's files where they would be unpacked:
    what lies in /etc/memd/conf.d wins over the file that the package brings."""
    (install,) = [line for line in commands if line.endswith("debian/memd/etc/memd/memd.toml")]
    etc = tree / "debian" / "memd" / "etc"
    (etc / "memd" / "conf.d").mkdir(parents=True, exist_ok=True)
    subprocess.run(install, cwd=tree, shell=True, check=True)
    unit = (tree / "debian" / "memd.service").read_text(encoding="utf-8")
    (start,) = re.findall(r"^ExecStart=/usr/bin/memd serve (.*)$", unit, re.MULTILINE)
    variables = dict(re.findall(r"^Environment=(\w+)=(\S+)$", unit, re.MULTILINE))
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MEMD_")}

    def effective() -> dict[str, dict[str, str]]:
        arguments = start.replace("/etc/", f"{etc}/").split()
        answer = subprocess.run(
            [sys.executable, "-m", "memd", "config", *arguments, "--json"],
            capture_output=True,
            text=True,
            check=True,
            env={**outside, **variables},
        )
        settings: dict[str, dict[str, str]] = json.loads(answer.stdout)
        return settings

    packaged, fragment = etc / "memd" / "memd.toml", etc / "memd" / "conf.d" / "site.toml"
    assert effective()["nvme"] == {"value": "10GiB", "origin": str(packaged)}
    fragment.write_text('nvme = "20GiB"\n')
    settings = effective()
    fragment.unlink()
    assert settings["nvme"] == {"value": "20GiB", "origin": str(fragment)}
    assert settings["host"] == {"value": "1GiB", "origin": str(packaged)}


def test_what_is_packed_by_name_is_there(tree: Path) -> None:
    for listing in ("memd.docs", "memd.examples"):
        for line in (tree / "debian" / listing).read_text(encoding="utf-8").split():
            assert (tree / line).exists(), line
    # The unit names it.
    assert "README.md" in (tree / "debian" / "memd.docs").read_text(encoding="utf-8").split()


def test_an_upgrade_restarts_the_service_and_leaves_the_socket(tree: Path) -> None:
    rules = (tree / "debian" / "rules").read_text(encoding="utf-8")
    socket = "dh_installsystemd --no-restart-after-upgrade --no-stop-on-upgrade memd.socket"
    recipe = f"override_dh_installsystemd:\n\t{socket}\n\tdh_installsystemd memd.service\n"
    assert recipe in rules


@pytest.mark.parametrize("name", [*SCRIPTS, "build.sh"])
def test_the_shell_takes_the_script(name: str) -> None:
    shell = "bash" if name.endswith(".sh") else "sh"
    script = DEBIAN / name
    subprocess.run([shell, "-n", script], check=True)
    if shell == "sh":
        assert "\n#DEBHELPER#\n" in script.read_text(encoding="utf-8")
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", f"--shell={shell}", "--severity=warning", script], check=True)


def test_a_purge_leaves_nothing_and_a_removal_all(tmp_path: Path) -> None:
    """The script with folders of this test in place of the system's."""
    etc, state, run = (tmp_path / name for name in ("etc/memd", "lib/memd", "run/memd"))
    kept = (etc / "conf.d" / "site.toml", state / "memd.volume", run / "attach.sock")
    for file in kept:
        file.parent.mkdir(parents=True)
        file.touch()
    script = (DEBIAN / "memd.postrm").read_text(encoding="utf-8")
    for path, place in (("/etc/memd", etc), ("/var/lib/memd", state), ("/run/memd", run)):
        script = re.sub(rf"(?<=\s){path}\b", str(place), script)

    def call(action: str) -> list[Path]:
        subprocess.run(["sh", "-c", script, "postrm", action], check=True)
        return [path for path in (etc, state, run, *kept) if path.exists()]

    assert call("remove") == [etc, state, run, *kept]
    # dpkg removes its own configuration and calls with this again.
    assert call("purge") == []
    assert call("purge") == []


def test_a_purge_leaves_what_others_put_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "theirs").touch()
    script = (DEBIAN / "memd.postrm").read_text(encoding="utf-8")
    script = script.replace("/etc/memd", str(tmp_path)).replace("/var/lib", f"{tmp_path}/none")
    script = script.replace("/run/memd", f"{tmp_path}/none")
    subprocess.run(["sh", "-c", script, "postrm", "purge"], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("target", ["deb", "try-deb"])
def test_the_makefile_runs_the_programs(target: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    plan = subprocess.run(
        ["make", "--dry-run", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    ).stdout
    program = {"deb": "deploy/debian/build.sh", "try-deb": "-m tests.soak.debian_package"}[target]
    assert program in plan
    help_text = (ROOT / "Makefile").read_text(encoding="utf-8").partition("SHELL :=")[0]
    assert re.search(rf"^# make {target} ", help_text, re.MULTILINE)


@pytest.mark.skipif(not BUILT, reason="dist/ has no package; `make deb` builds one")
@pytest.mark.parametrize("package", BUILT, ids=lambda package: package.name)
def test_the_packages_in_dist_hold_what_they_should(package: Path) -> None:
    archive = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        members = {member.name.removeprefix("./"): member for member in files}
        for source, place in SYSTEMD_FILES.values():
            packed = files.extractfile(members[place])
            assert packed is not None
            assert packed.read() == (SYSTEMD / source).read_bytes()
        program = files.extractfile(members["usr/lib/memd/bin/memd"])
        assert program is not None
        assert program.readline() == b"#!/usr/lib/memd/bin/python3 -I\n"
    assert members["usr/bin/memd"].linkname.endswith("lib/memd/bin/memd")
    assert {member.uname for member in members.values()} == {"root"}
    for path in (
        "etc/memd/memd.toml",
        "usr/share/doc/memd/README.md",
        "usr/share/man/man1/memd.1.gz",
        "usr/share/man/man1/memd-job-list.1.gz",
        "usr/share/bash-completion/completions/memd",
        "usr/share/zsh/vendor-completions/_memd",
        "usr/share/fish/vendor_completions.d/memd.fish",
    ):
        assert path in members
    assert [name for name in members if "/torch/" in name or name.endswith(".pyc")] == []
    conffiles = subprocess.run(
        ["dpkg-deb", "--info", package, "conffiles"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert conffiles == ["/etc/memd/memd.toml"]
