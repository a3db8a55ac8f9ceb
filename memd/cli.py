"""The command `memd`. Exit codes: 0 done, 1 failed, 2 wrong use, 3 data is lost or damaged, 4 no
daemon answers."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memd import __version__, status_text
from memd.config import DEFAULT_FILE, Settings, SettingsError, load, shown
from memd.failures import Damaged, Fatal, WrongUse, failure_of
from memd.printing import as_dict, print_json, print_lines, print_message, print_table
from memd.refusal import Refused, StatusCode
from memd.sizes import format_size

# A command imports what it alone needs: `memd serve` stays light, `memd config` quick.
if TYPE_CHECKING:
    from collections.abc import Callable

    from memd.client import DaemonClient
    from memd.config import Configuration
    from memd_proto.v1 import job_pb2, types_pb2


class Commands(click.Group):
    """Imports a command's own needs when it is called: `memd demo` needs torch."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*super().list_commands(context), "bench", "demo"])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name == "bench":
            from memd.bench import command as bench

            return bench
        if name != "demo":
            return super().get_command(context, name)
        try:
            from memd.demo import command
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"memd demo needs the package {error.name}: pip install {error.name}"
            ) from error
        return command

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except SettingsError as error:
            raise click.UsageError(str(error)) from error
        except Refused as error:
            raise failure_of(error) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="memd %(version)s")
def main() -> None:
    """Memory and NVMe for training state.

    Exit codes: 0 done, 1 failed, 2 wrong use, 3 data is lost or damaged, 4 no daemon answers.
    """


def setting_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The settings that have a flag, with the default of each."""
    for option in (
        setting_option("log_level", help="debug, info, warning or error."),
        setting_option("log_format", help="text or json, one event a line, on stderr."),
        setting_option("metrics", metavar="HOST:PORT", help="Prometheus endpoint; '' is none."),
        setting_option("nvme", metavar="SIZE", help="Space on all folders together."),
        setting_option("host", metavar="SIZE", help="Memory for all jobs."),
        data_option,
        setting_option("socket", metavar="PATH", help="The control socket."),
        config_option,
    ):
        command = option(command)
    return command


def setting_option(
    name: str, *, help: str, metavar: str | None = None, multiple: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The default counts where neither a variable nor the file has the setting: click gets none."""
    default = shown(Settings())[name]
    return click.option(
        f"--{name.replace('_', '-')}",
        metavar=metavar,
        multiple=multiple,
        help=f"{help}  [default: {default}]",
    )


config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="Settings in TOML; those in conf.d/*.toml beside it win.  "
    f"[default: {DEFAULT_FILE}, where it exists]",
)
data_option = setting_option(
    "data", metavar="DIR", multiple=True, help="One folder a drive; repeatable."
)
socket_option = click.option(
    "--socket",
    metavar="PATH",
    help=f"The daemon's control socket.  [default: that of MEMD_ADDRESS, or {Settings().socket}]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")


def configuration_of(
    config_file: Path | None, flags: dict[str, Any], *, needs_daemon: bool = True
) -> Configuration:
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    return load(flags=given, environ=os.environ, file=config_file, needs_daemon=needs_daemon)


class Serve(click.Command):
    """Its wrong use is an event of the log: what starts daemons reads one format."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        given = list(args)  # click takes its words out of the other
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            from memd import log
            from memd.config import log_format_wanted

            # The rest of the words says in which format.
            lenient = click.Context(
                self,
                info_name=info_name,
                parent=parent,
                resilient_parsing=True,
                ignore_unknown_options=True,
                allow_extra_args=True,
            )
            self.parse_args(lenient, given)
            flags = {"log_format": lenient.params.get("log_format")}
            file = lenient.params.get("config_file")
            log_format = log_format_wanted(flags=flags, environ=os.environ, file=file)
            log.configure(log_format=log_format, log_level="info")
            reason = f"{error.format_message()} See `memd serve --help`."
            raise Fatal(WrongUse(reason)) from error


@main.command(cls=Serve)
@setting_flags
@setting_option(
    "holder_seconds",
    metavar="SECONDS",
    help="How long memory outlives a dead daemon; 0: it does not.",
)
@click.option("--parent-pid", type=int, hidden=True)
@click.option("--unlocked-ok", is_flag=True, hidden=True)
def serve(
    config_file: Path | None, parent_pid: int | None, unlocked_ok: bool, **flags: Any
) -> None:
    """The daemon, in the foreground. Prints one line when it is ready."""
    from memd import log
    from memd.config import log_format_wanted
    from memd.daemon import Daemon, Options
    from memd_native import StatusError

    try:
        configuration = configuration_of(config_file, flags)
    except SettingsError as error:
        log_format = log_format_wanted(flags=flags, environ=os.environ, file=config_file)
        log.configure(log_format=log_format, log_level="info")
        raise Fatal(WrongUse(str(error))) from error
    settings = configuration.settings
    log.configure(log_format=settings.log_format, log_level=settings.log_level)
    log.tell_uncaught_errors()
    daemon = Daemon(
        configuration,
        options=Options(parent_pid=parent_pid, lock_required=not unlocked_ok),
        environ=os.environ,
        reload=lambda: configuration_of(config_file, flags),
    )
    try:
        daemon.run()
    except StatusError as error:
        raise Fatal(failure_of(Refused(StatusCode(error.code), str(error)))) from error
    except Refused as error:
        raise Fatal(failure_of(error)) from error
    except SettingsError as error:
        raise Fatal(WrongUse(str(error))) from error


@main.command()
@setting_flags
@json_option
def config(config_file: Path | None, as_json: bool, **flags: Any) -> None:
    """Prints the settings in effect, with units, and where each came from.

    The last rows are no settings: how much each data folder's path is given at a time, which
    `memd bench io --calibrate` measures.
    """
    from memd.calibration import limits_in_use

    configuration = configuration_of(config_file, flags)
    texts = shown(configuration.settings)
    rows = [(name, text, configuration.origins[name]) for name, text in texts.items()]
    for folder in configuration.settings.data:
        limits, origin = limits_in_use(folder, depth=configuration.settings.io_depth)
        rows.append((f"path {folder}", str(limits), origin))
    if as_json:
        print_json({name: {"value": text, "origin": origin} for name, text, origin in rows})
    else:
        print_table(("setting", "value", "origin"), rows)


@main.command()
@socket_option
@json_option
@click.option("--inflight", is_flag=True, help="What was begun and is not done, oldest first.")
@click.option(
    "--probe",
    "probed",
    type=click.Choice(["ready", "live"]),
    is_flag=False,
    flag_value="ready",
    help="Says in a word whether it takes work; --probe=live, whether it answers. For probes of "
    "Kubernetes and the like: needs no identity, and exits with 1 or 4 where not.",
)
def status(socket: str | None, as_json: bool, inflight: bool, probed: str | None) -> None:
    """The daemon at a glance."""
    if probed is not None:
        from memd.probe import probe

        path = configuration_of(None, {"socket": socket}).settings.socket
        state = probe(path, wants_ready=probed == "ready")
        print_json({"state": state}) if as_json else click.echo(state)
        return
    with connected(socket) as daemon:
        if inflight:
            activities = daemon.in_flight()
            print_message(activities) if as_json else print_lines(
                status_text.in_flight_lines(activities)
            )
            return
        answer = daemon.status()
    if as_json:
        print_message(answer)
    else:
        print_lines(status_text.daemon_lines(answer))


@main.command()
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="From one look to the next.",
)
@click.option(
    "--count", type=click.IntRange(min=1), metavar="N", help="Ends after that many looks."
)
@socket_option
@json_option
def top(interval_s: float, count: int | None, socket: str | None, as_json: bool) -> None:
    """The daemon live: what `memd status` shows, and what happens in a second.

    On a terminal the view is drawn in place until Ctrl-C; elsewhere one block follows the other,
    and with --json one object a line. The first look has no rates. Reads and writes are those of
    all on a volume; a job fetches what it uses from disk and spills what makes room. Stalled is the
    part of their time that its sessions' threads stood still, by what for.

    While a daemon is away the view says so, and goes on when it is back. Exits with 4 if none
    answers at the first look or at the last of --count.
    """
    from memd.top import command

    command.run(
        configuration_of(None, {"socket": socket}).settings,
        interval_s=interval_s,
        count=count,
        as_json=as_json,
        is_colored=not os.environ.get("NO_COLOR"),
    )


@main.group()
def job() -> None:
    """Jobs: their bytes stay until they are dropped."""


@job.command("list")
@socket_option
@json_option
def list_jobs(socket: str | None, as_json: bool) -> None:
    """Your jobs; root and the daemon's user see all."""
    with connected(socket) as daemon:
        jobs = daemon.jobs()
    if as_json:
        print_json([as_dict(each) for each in jobs])
    else:
        print_lines(status_text.job_lines(jobs))


@job.command("show")
@click.argument("name")
@socket_option
@json_option
def show_job(name: str, socket: str | None, as_json: bool) -> None:
    """One job and its shards."""
    with connected(socket) as daemon:
        answer = daemon.job(name)
    if as_json:
        print_message(answer)
        return
    from memd_proto.v1 import types_pb2

    print_lines(status_text.job_lines([answer.job]))
    rows = [
        (
            shard.spec.name,
            types_pb2.ShardKind.Name(shard.spec.kind).removeprefix("SHARD_KIND_").lower(),
            types_pb2.Tier.Name(shard.spec.tier).removeprefix("TIER_").lower(),
            types_pb2.DType.Name(shard.spec.dtype).removeprefix("D_TYPE_").lower(),
            "x".join(map(str, shard.spec.shape)) or "scalar",
            format_size(shard.bytes),
            _state(shard),
        )
        for shard in answer.shards
    ]
    click.echo()
    print_table(("shard", "kind", "tier", "dtype", "shape", "bytes", "updates"), rows)


def _state(shard: types_pb2.Shard) -> str:
    if shard.lost:
        return "lost"
    if shard.unreadable:
        return "unreadable"
    return str(shard.generation) if shard.written else "never written"


@job.command("drop")
@click.argument("name")
@click.option(
    "--force", is_flag=True, help="Even while sessions are attached, and with its snapshots."
)
@click.option("--yes", is_flag=True, help="Does not ask before it drops.")
@socket_option
@json_option
def drop_job(name: str, force: bool, yes: bool, socket: str | None, as_json: bool) -> None:
    """Drops all bytes of a job, in memory and on disk."""
    lost = "parameters, optimizer states" + (", snapshots" if force else "") + " and blobs"
    confirm(f"Drop job {name}? Its {lost} are gone then", yes=yes)
    with connected(socket) as daemon:
        daemon.drop_job(name, force=force)
    if as_json:
        print_json({"dropped": name})
    else:
        click.echo(f"dropped {name}")


# A negative number is no option.
@job.command("weight", context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.argument("weight", type=float, metavar="W")
@socket_option
@json_option
def weight_job(name: str, weight: float, socket: str | None, as_json: bool) -> None:
    """How much a job gets of devices and update threads that other jobs want as well.

    W is 0.1 to 10, and 1 where nothing was set: beside a job of weight 1, one of weight 3 moves
    three bytes for each of the other's. Alone a job gets all, whatever its weight. More than 1
    takes from other users' jobs and is for root and the daemon's user.

    The weight counts at once, and is kept with the job from its next commit on.
    """
    with connected(socket) as daemon:
        daemon.set_job_weight(name, weight)
        kept = daemon.job(name).job.weight
    if as_json:
        print_json({"job": name, "weight": kept})
    else:
        click.echo(f"{name} has weight {kept:g}")


@main.group()
def snapshot() -> None:
    """Snapshots: committed steps that a job keeps while it trains on."""


@snapshot.command("create")
@click.argument("job_name", metavar="JOB")
@click.argument("name")
@socket_option
@json_option
def create_snapshot(job_name: str, name: str, socket: str | None, as_json: bool) -> None:
    """Keeps the last committed step of JOB as NAME.

    Nothing is copied. The job's next step waits until the snapshot is on disk; forward and backward
    go on. A snapshot counts as one state more against the job's disk quota until it is dropped.
    """
    with connected(socket) as daemon:
        made = daemon.create_snapshot(job_name, name)
    if as_json:
        print_message(made)
    else:
        click.echo(f"{job_name}: snapshot {made.name} of step {made.step}")


@snapshot.command("list")
@click.argument("job_name", metavar="[JOB]", required=False)
@socket_option
@json_option
def list_snapshots(job_name: str | None, socket: str | None, as_json: bool) -> None:
    """The snapshots of JOB, or of all your jobs; oldest first."""
    with connected(socket) as daemon:
        names = [job_name] if job_name else [each.name for each in daemon.jobs()]
        found = [(name, each) for name in names for each in daemon.snapshots(name)]
    if as_json:
        print_json([{"job": name, **as_dict(each)} for name, each in found])
        return
    rows = [
        (
            name,
            each.name,
            str(each.step),
            f"{datetime.fromtimestamp(each.created_s):%Y-%m-%d %H:%M}",
            format_size(each.bytes),
            _snapshot_state(each),
        )
        for name, each in found
    ]
    print_table(("job", "snapshot", "step", "made", "bytes", "state"), rows)


def _snapshot_state(snapshot: job_pb2.Snapshot) -> str:
    if snapshot.is_lost:
        return "lost"
    if snapshot.lost_shards:
        return f"{snapshot.lost_shard_count} shards lost"
    return f"exported: {snapshot.exported_part:.0%}" if snapshot.is_exported else "whole"


@snapshot.command("export")
@click.argument("job_name", metavar="JOB")
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["safetensors", "dcp"]),
    default="safetensors",
    show_default=True,
    help="dcp: for torch.distributed.checkpoint; made with PyTorch.",
)
@click.option(
    "--max-file",
    metavar="SIZE",
    help="What is larger becomes several files.  [default: 50GB]",
)
@click.option("--detach", is_flag=True, help="Returns once it has begun, and it goes on.")
@click.option("--begun-fd", type=int, hidden=True)
@socket_option
@json_option
def export_snapshot(
    job_name: str,
    name: str,
    path: Path,
    file_format: str,
    max_file: str | None,
    detach: bool,
    begun_fd: int | None,
    socket: str | None,
    as_json: bool,
) -> None:
    """Writes snapshot NAME of JOB as the new folder PATH.

    The daemon reads the snapshot below all other I/O while the job trains on; this command writes
    the files, with your rights. PATH is there once all of it is on disk. Until then PATH.partial
    is, and the same command goes on with that: after Ctrl-C, which ends the export, and after
    errors and kills. While the daemon restarts, the command waits for it. With --detach the export
    goes on in a process of its own, whose messages are in PATH.partial/messages.

    model.safetensors has the weights and buffers, and memd_client.load_safetensors() takes the
    folder; optimizer.safetensors has exp_avg, exp_avg_sq, step and, if there is one,
    max_exp_avg_sq behind the name of each parameter, and for bf16 master, its fp32 value;
    blobs.safetensors has what session.put() and session.track() stored.

    With --format dcp, dcp.load() of plain torch and memd_client.checkpoint.Reader take the folder:
    "model", and "optimizer" with "state" by the names of parameters, as torch's get_state_dict()
    has them; settings of groups are not in it.
    """
    from memd.export import command

    if detach:
        given = ["snapshot", "export", job_name, name, str(path), "--format", file_format]
        for flag, value in (("--max-file", max_file), ("--socket", socket)):
            given += [flag, value] if value else []
        pid = command.run_in_background(given)
        if as_json:
            print_json({"job": job_name, "snapshot": name, "pid": pid})
        else:
            click.echo(f"{job_name}: snapshot {name} is exported to {path} by process {pid}")
        return
    report = command.run(
        lambda: connected(socket),
        job=job_name,
        snapshot=name,
        path=path,
        file_format=file_format,
        max_file=max_file,
        begun_fd=begun_fd,
    )
    print_json(report) if as_json else command.tell_end(report)


@snapshot.command("restore")
@click.argument("job_name", metavar="JOB")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Does not ask before it goes back.")
@socket_option
@json_option
def restore_snapshot(
    job_name: str, name: str, yes: bool, socket: str | None, as_json: bool
) -> None:
    """JOB goes back to its snapshot NAME.

    The job is as it was then, with the shards of that time, and its next session resumes at that
    step. Its newer steps are gone, unless another snapshot keeps them. Its quotas and its snapshots
    stay. Refused while the job is in use.
    """
    confirm(f"Go back to snapshot {name}? Newer steps of {job_name} are gone then", yes=yes)
    with connected(socket) as daemon:
        restored = daemon.restore_snapshot(job_name, name)
    if as_json:
        print_message(restored)
    else:
        click.echo(f"{job_name} is at step {restored.step}, of snapshot {name}")


@snapshot.command("drop")
@click.argument("job_name", metavar="JOB")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Does not ask before it drops.")
@socket_option
@json_option
def drop_snapshot(job_name: str, name: str, yes: bool, socket: str | None, as_json: bool) -> None:
    """Drops snapshot NAME of JOB, and frees the bytes that it alone keeps."""
    confirm(
        f"Drop snapshot {name} of {job_name}? The bytes that it alone keeps are gone then", yes=yes
    )
    with connected(socket) as daemon:
        daemon.drop_snapshot(job_name, name)
    if as_json:
        print_json({"job": job_name, "dropped": name})
    else:
        click.echo(f"{job_name}: dropped snapshot {name}")


def confirm(question: str, *, yes: bool) -> None:
    """Asks on a terminal; elsewhere only --yes says so."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question}: say --yes, or call this from a terminal")
    click.confirm(question, abort=True, err=True)


@main.command()
@data_option
@socket_option
@click.option("--job", "job_name", metavar="NAME", default="", help="This job alone, not all.")
@config_option
@json_option
def check(
    config_file: Path | None,
    data: tuple[str, ...],
    job_name: str,
    as_json: bool,
    socket: str | None,
) -> None:
    """Reads and compares everything on the volumes, and says what is lost.

    With --socket the daemon does it beside its work, below all other I/O; with --data this command
    does, on folders that no daemon has open, and writes nothing. With neither it is the daemon of
    the settings where one answers, and else the folders of the settings. A superblock that is
    damaged while its twin is whole is a warning, which the next commits mend.

    Exit codes: 0 all is there, 1 failed, 2 wrong use, 3 something is lost or damaged, 4 no daemon
    answers.
    """
    from memd import check as checks

    if socket is not None and data:
        raise click.UsageError("--socket asks a daemon, --data reads folders: name one of them")
    settings = configuration_of(
        config_file, {"data": data, "socket": socket}, needs_daemon=not data
    ).settings
    daemon = None if data else daemon_of(settings.attach_socket, required=socket is not None)
    if daemon is None:
        report = checks.check_offline(settings.data, job=job_name)
    else:
        with daemon:
            report = checks.check_online(daemon, job=job_name)
    if as_json:
        print_json(report)
    else:
        checks.print_check(report)
    if report["lost"]:
        sys.exit(Damaged.exit_code)


def daemon_of(attach_socket: Path, *, required: bool) -> DaemonClient | None:
    """Nothing where none answers and none is `required`."""
    from memd.client import DaemonClient

    try:
        return DaemonClient(attach_socket)
    except Refused as refused:
        if required or refused.code is not StatusCode.UNAVAILABLE:
            raise
        return None


@main.group()
def volume() -> None:
    """Volumes: the files on disk that hold all jobs."""


@volume.command("list")
@data_option
@config_option
@json_option
def list_volumes(config_file: Path | None, data: tuple[str, ...], as_json: bool) -> None:
    """The volumes of a set and their jobs, from their superblocks.

    Nothing is written, and a daemon may have them open: its last commit may then be missing here.
    """
    from memd import volumes

    found = volumes.listed(folders_of(config_file, data))
    if as_json:
        print_json(found)
        return
    print_table(volumes.VOLUME_HEADER, volumes.volume_rows(found))
    click.echo()
    if found["jobs_unknown"]:
        click.echo(f"not all jobs are known: {found['jobs_unknown']}; see `memd check`")
    rows = [
        (
            each["job"],
            str(each["step"]),
            str(each["shards"]),
            format_size(each["bytes"]),
            volumes.snapshots_text(each),
        )
        for each in found["jobs"]
    ]
    print_table(("job", "step", "shards", "bytes", "snapshots"), rows)


@volume.command("format")
@setting_option("nvme", metavar="SIZE", help="Space on all folders together.")
@data_option
@click.option("--force", is_flag=True, help="Removes volumes that are there, with all their jobs.")
@click.option("--yes", is_flag=True, help="Does not ask before it removes.")
@config_option
@json_option
def format_volume(
    config_file: Path | None,
    data: tuple[str, ...],
    force: bool,
    yes: bool,
    as_json: bool,
    nvme: str | None,
) -> None:
    """Makes volumes ahead of a daemon's first start, which otherwise does it.

    They are allocated and written in full, which takes as long as the disk needs for that many
    bytes. The daemon must be given the same folders and the same --nvme.
    """
    from memd import volumes

    settings = configuration_of(
        config_file, {"data": data, "nvme": nvme}, needs_daemon=False
    ).settings
    seconds = volumes.format_anew(settings.data, nvme=settings.nvme, force=force, yes=yes)
    found = volumes.listed(settings.data)
    if as_json:
        print_json({**found, "seconds": seconds})
        return
    print_table(volumes.VOLUME_HEADER, volumes.volume_rows(found))


def folders_of(config_file: Path | None, data: tuple[str, ...]) -> tuple[Path, ...]:
    return configuration_of(config_file, {"data": data}, needs_daemon=False).settings.data


@main.command()
@setting_flags
@json_option
def doctor(config_file: Path | None, as_json: bool, **flags: Any) -> None:
    """Names what of this machine stands in memd's way, each with what to do.

    A daemon that answers is asked. Else this looks at what `memd serve` of the calling user would
    need: memory and its locking, huge pages, io_uring and other system calls,
    the file systems of the data folders and the cost of a sync, the group of the sockets, the port
    of the metrics. Give it the same --config and flags. It writes a file memd.doctor into each data
    folder and removes it.

    Exit codes: 0 nothing is in the way, notes or not; 1 an obstacle; 2 wrong use.
    """
    from memd.client import DaemonClient
    from memd.doctor import command
    from memd.doctor.finding import State

    settings = configuration_of(config_file, flags).settings
    found = command.run(settings, lambda: DaemonClient(settings.attach_socket))
    print_json(command.records(found)) if as_json else command.print_for_people(found)
    if any(each.state is State.OBSTACLE for each in found):
        sys.exit(1)


@main.command()
@json_option
def version(as_json: bool) -> None:
    """The version of memd."""
    if as_json:
        print_json({"version": __version__})
    else:
        click.echo(f"memd {__version__}")


def connected(socket: str | None) -> DaemonClient:
    from memd.client import DaemonClient

    flags = {"socket": socket}
    return DaemonClient(configuration_of(None, flags).settings.attach_socket)
