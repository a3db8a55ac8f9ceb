"""Writes the golden image of the format that this version of memd writes: `python -m
tests.golden.make_image FOLDER`, FOLDER on a disk. See README.md beside it."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.golden import image

HERE = Path(__file__).parent


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as name:
        folder = Path(name)
        image.write(folder)
        header = (folder / "memd.volume").read_bytes()[:12]
        version = (
            f"{int.from_bytes(header[8:10], 'little')}.{int.from_bytes(header[10:12], 'little')}"
        )
        packed = HERE / f"format-{version}.xz.b64"
        if packed.exists():
            sys.exit(f"{packed} exists: an image that was released is never written again")
        image.pack(folder / "memd.volume", packed)
        with image.opened(folder) as server:
            expected = {"snapshots": image.snapshots(server), "jobs": image.content(server)}
        with image.opened(folder) as server:
            job = server.find_job(image.JOB)
            session_id = server.attach(job.job_id).session_id
            image.train_one_step(server, session_id)
            expected["jobs_after_one_more_step"] = image.content(server)
    (HERE / f"format-{version}.json").write_text(json.dumps(expected, indent=1) + "\n")
    sys.stdout.write(f"{packed}: {packed.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
