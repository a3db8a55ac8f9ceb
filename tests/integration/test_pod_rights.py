"""A daemon with the rights of deploy/kubernetes, and a trainer with those of the example."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.integration.test_daemon_service import with_mode

if TYPE_CHECKING:
    from tests.daemons import Daemons

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"

# It loads what it needs before it becomes a user who may enter no home.
TRAINER = """
import os, sys
from pathlib import Path
import grpc
from tests.daemons import Attached
grpc.insecure_channel("unix:memd.sock").close()  # the first channel loads the rest of gRPC
os.chdir(sys.argv[1])
os.setgroups([int(group) for group in sys.argv[3:]])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
sys.meta_path.clear()
try:
    print(Attached(Path("attach.sock"), control_address="unix:memd.sock").attach("gpt").created)
except PermissionError as error:
    print("PermissionError")
"""


def test_the_daemon_locks_its_pool_and_the_group_may_connect(daemons: Daemons) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becoming another user needs root and setpriv")
    daemon_set = yaml.safe_load((FOLDER / "base/daemon-set.yaml").read_text())
    job = yaml.safe_load((FOLDER / "example/training-job.yaml").read_text())
    rights = daemon_set["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    theirs = job["spec"]["template"]["spec"]["securityContext"]
    capabilities = ",".join(f"+{name.lower()}" for name in rights["capabilities"]["add"])
    before = ["prlimit", "--memlock=65536", "setpriv", f"--reuid={rights['runAsUser']}"]
    before += [f"--regid={rights['runAsGroup']}", "--clear-groups", "--no-new-privs"]
    before += [f"--bounding-set=-all,{capabilities}"]
    daemon = daemons.start(name="pod", before=before, environ={"MEMD_HOLDER_SECONDS": "0"})
    assert "the pool is not locked" not in daemon.log.read_text()
    folder = daemon.socket.parent

    def said(*groups: int) -> str:
        command = [sys.executable, "-c", TRAINER, str(folder), str(theirs["runAsUser"])]
        command += [str(group) for group in groups]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    # The kubelet makes the node's folder, open to all.
    with with_mode(0o755, daemons.sockets, folder):
        assert said(*theirs["supplementalGroups"]) == "True\n"
        assert said() == "PermissionError\n"
    assert daemon.stop() == 0
