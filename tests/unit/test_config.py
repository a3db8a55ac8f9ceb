"""Settings: which source wins, what is refused, and what the refusal says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import memd_client
from memd import config
from memd.config import Configuration, SettingsError, load, log_format_wanted, shown
from memd.sizes import exact_size, format_size, parse_size
from memd_client.base.address import EmbeddedAddress, UnixAddress, parse_address


@pytest.fixture(autouse=True)
def without_a_file_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "DEFAULT_FILE", tmp_path / "etc.toml")


def from_file(folder: Path, text: str) -> Configuration:
    file = folder / "memd.toml"
    file.write_text(text)
    return load(flags={}, environ={}, file=file)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        *(("64GiB", 64 << 30), ("1.5 MiB", 3 << 19), ("4096B", 4096), (" 2TiB ", 2 << 40)),
        *(("12GB", 12 * 10**9), ("1.5 TB", 1_500_000_000_000), ("5MB", 5_000_000), ("7kB", 7000)),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["64", "64G", "64gb", "-1GiB", "GiB", "0MiB", ""])
def test_a_size_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write a number and one of|more than nothing"):
        parse_size(text)


@pytest.mark.parametrize("size_bytes", [1, 1000, 1 << 20, 3 << 19, (1 << 30) + 1])
def test_a_shown_size_reads_back_exactly(size_bytes: int) -> None:
    assert parse_size(exact_size(size_bytes)) == size_bytes
    assert exact_size(12 * 10**9) == "12GB"
    assert exact_size(3 << 19) == "1536KiB"
    assert format_size(3 << 29) == "1.5 GiB"


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "memd.toml"
    file.write_text('host = "1GiB"\nnvme = "20GiB"\nmetrics = ""\n')
    effective = load(
        flags={"host": "3GiB"}, environ={"MEMD_HOST": "2GiB", "MEMD_NVME": "30GiB"}, file=file
    )
    assert effective.settings.host == 3 << 30
    assert effective.settings.nvme == 30 << 30
    assert effective.settings.metrics == ""
    assert effective.settings.io_depth == 0
    assert effective.origins["host"] == "--host"
    assert effective.origins["nvme"] == "MEMD_NVME"
    assert effective.origins["metrics"] == str(file)
    assert effective.origins["io_depth"] == "default"


def test_every_setting_can_be_read_back_from_what_config_shows() -> None:
    given = {"data": ("/a", "/b"), "host": "3MiB", "huge_pages": "false", "metrics": "[::1]:0"}
    effective = load(flags=given, environ={})
    variables = {f"MEMD_{name.upper()}": text for name, text in shown(effective.settings).items()}
    assert load(flags={}, environ=variables).settings == effective.settings


def test_the_default_file_is_used_where_it_exists() -> None:
    config.DEFAULT_FILE.write_text("io_depth = 8\n")
    assert load(flags={}, environ={}).settings.io_depth == 8


def test_a_misspelt_setting_is_refused_with_the_right_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"memd\.toml: .*'hots'; did you mean 'host'"):
        from_file(tmp_path, 'hots = "1GiB"\n')
    with pytest.raises(SettingsError, match="'MEMD_NVMEE'; did you mean 'MEMD_NVME'"):
        load(flags={}, environ={"MEMD_NVMEE": "1GiB"})


def test_variables_of_others_are_left_alone() -> None:
    others = {
        "MEMD_SERVICE_HOST": "10.0.0.1",
        "MEMD_PORT_9464_TCP": "tcp://10.0.0.1:9464",
    }
    assert load(flags={}, environ=others).settings == config.Settings()


def test_the_address_of_scripts_is_the_daemon_s_too(tmp_path: Path) -> None:
    file = tmp_path / "memd.toml"
    file.write_text('socket = "/file/memd.sock"\n')
    both = {"MEMD_ADDRESS": "unix:///address/memd.sock", "MEMD_SOCKET": "/variable/memd.sock"}
    for flags, environ, path, origin in (
        ({"socket": "/flag/memd.sock"}, both, "/flag/memd.sock", "--socket"),
        ({}, both, "/address/memd.sock", "MEMD_ADDRESS"),
        ({}, {**both, "MEMD_ADDRESS": ""}, "/variable/memd.sock", "MEMD_SOCKET"),
        ({}, {}, "/file/memd.sock", str(file)),
    ):
        found = load(flags=flags, environ=environ, file=file)
        assert (str(found.settings.socket), found.origins["socket"]) == (path, origin)


@pytest.mark.parametrize(
    "address",
    [
        *("unix:///srv/memd.sock", "unix:/srv/memd.sock", "unix:////srv", "unix:srv", "unix://srv"),
        *("unix:", "embedded:", "embedded:/data", "host:9470", "/run/memd.sock"),
    ],
)
def test_the_daemon_and_scripts_read_an_address_alike(address: str) -> None:
    try:
        client = parse_address(address)
    except memd_client.MemdError:
        client = EmbeddedAddress()
    environ = {"MEMD_ADDRESS": address}
    if isinstance(client, UnixAddress):
        assert load(flags={}, environ=environ).settings.socket == client.socket
        return
    with pytest.raises(SettingsError, match=r"MEMD_ADDRESS: .* is no unix socket.*--socket"):
        load(flags={}, environ=environ)
    # Nobody asks the address.
    assert load(flags={"socket": "/a"}, environ=environ).settings.socket == Path("/a")
    assert load(flags={}, environ=environ, needs_daemon=False).settings == config.Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host = 64", "host: '64' has no unit; write a number and one of B, KiB"),
        ('host = "64"', "host: '64' has no unit"),
        ('nvme = "10gb"', "nvme: '10gb' is not a size"),
        ('io_engine = "aio"', "io_engine: 'aio' is none of auto, io_uring, threads"),
        ("io_depth = 0", "io_depth: 0 is not a whole number from 1"),
        ("io_depth = true", "io_depth: True is not a whole number from 1 to 1024, or 'auto'"),
        ('huge_pages = "yes"', "huge_pages: 'yes' is neither true nor false"),
        ('metrics = "9464"', "metrics: '9464' is not host:port"),
        ("data = []", "data: .* is not a list of folders"),
        ('data = ["/a", "/a"]', "data: names a folder twice"),
        ("data = 5", "data: 5 is not a list of folders"),
        ("socket = 5", "socket: 5 is not a text"),
        ('socket = "/' + 100 * "s" + '/memd.sock"', "at most 107 bytes, choose a shorter"),
        ("scrub = 16", "scrub: '16' has no unit"),
        ('scrub = "-1MiB"', "scrub: '-1MiB' is not a size"),
        ("scrub = true", "scrub: 'True' is not a size"),
        ("host =", "is not TOML"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name_and_a_remedy(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        from_file(tmp_path, text)


@pytest.mark.parametrize(("text", "rate", "shown_as"), [("0", 0, "0"), ("4MiB", 4 << 20, "4MiB")])
def test_the_scrub_has_a_rate_or_is_off(
    tmp_path: Path, text: str, rate: int, shown_as: str
) -> None:
    configuration = from_file(tmp_path, f'scrub = "{text}"')
    assert configuration.settings.scrub == rate
    assert config.shown(configuration.settings)["scrub"] == shown_as


def test_a_configuration_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml: cannot be read: No such file"):
        load(flags={}, environ={}, file=tmp_path / "none.toml")


def test_the_shipped_configuration_is_accepted() -> None:
    file = Path(__file__).parents[2] / "deploy" / "memd.toml"
    assert load(flags={}, environ={}, file=file).settings.host == 16 << 30


def write_fragments(folder: Path, **texts: str) -> Path:
    """The file of settings, with the fragments beside it."""
    (folder / "conf.d").mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / "conf.d" / f"{name}.toml").write_text(text)
    return folder / "memd.toml"


def test_fragments_win_over_the_file_and_a_later_name_over_an_earlier_one(tmp_path: Path) -> None:
    file = write_fragments(
        tmp_path, b_late='host = "3GiB"\n', a_early='host = "2GiB"\nnvme = "20GiB"\n'
    )
    file.write_text('host = "1GiB"\nnvme = "10GiB"\nmax_jobs = 7\nio_depth = 4\n')
    (tmp_path / "conf.d" / "z.toml.dpkg-old").write_text('host = "9GiB"\n')
    (tmp_path / "conf.d" / ".z.toml").write_text('host = "9GiB"\n')
    depth = {"MEMD_IO_DEPTH": "8"}
    for found in (
        load(flags={}, environ=depth, file=file),
        load(flags={}, environ={**depth, "MEMD_CONFIG": str(file)}),
    ):
        settings = found.settings
        assert (settings.host, settings.nvme, settings.max_jobs) == (3 << 30, 20 << 30, 7)
        assert settings.io_depth == 8
        assert found.origins["host"] == str(tmp_path / "conf.d" / "b_late.toml")
        assert found.origins["nvme"] == str(tmp_path / "conf.d" / "a_early.toml")
        assert found.origins["max_jobs"] == str(file)
        assert found.origins["io_depth"] == "MEMD_IO_DEPTH"


@pytest.mark.parametrize("has_file", [True, False])
def test_fragments_beside_the_default_file_count_with_it_and_without(has_file: bool) -> None:
    write_fragments(config.DEFAULT_FILE.parent, site="max_jobs = 9\n")
    if has_file:
        config.DEFAULT_FILE.write_text("max_jobs = 8\nio_depth = 8\n")
    settings = load(flags={}, environ={}).settings
    assert (settings.max_jobs, settings.io_depth) == (9, 8 if has_file else 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('hots = "1GiB"\n', r"conf\.d/a\.toml: .*'hots'; did you mean 'host'"),
        ('host = "64"\n', r"conf\.d/a\.toml: host: '64' has no unit"),
        ("host =\n", r"conf\.d/a\.toml: is not TOML"),
    ],
)
def test_a_wrong_fragment_is_named_also_where_a_later_one_wins(
    tmp_path: Path, text: str, message: str
) -> None:
    file = write_fragments(tmp_path, a=text, b='host = "1GiB"\n')
    file.write_text('host = "1GiB"\n')
    with pytest.raises(SettingsError, match=message):
        load(flags={}, environ={}, file=file)


@pytest.mark.parametrize("name", ["conf.d", "conf.d/a.toml"])
@pytest.mark.parametrize("how", ["writable", "owned"])
def test_fragments_that_others_can_change_are_refused(tmp_path: Path, name: str, how: str) -> None:
    file = write_fragments(tmp_path, a="max_jobs = 9\n")
    path = tmp_path / name
    if how == "writable":
        path.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        pytest.skip("only root gives a file away")
    with pytest.raises(SettingsError, match=f"{re.escape(str(path))}: others can change it"):
        load(flags={}, environ={}, file=file)


def test_a_folder_of_fragments_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "conf.d").write_text("")
    with pytest.raises(SettingsError, match=r"conf\.d: cannot be read: Not a directory"):
        from_file(tmp_path, "")


def test_the_format_in_which_wrong_settings_are_told_may_be_a_fragment_s(tmp_path: Path) -> None:
    file = write_fragments(tmp_path, a='log_format = "json"\nhots = "1GiB"\n')
    file.write_text('log_format = "text"\n')
    assert log_format_wanted(flags={}, environ={}, file=file) == "json"
    write_fragments(tmp_path, b="host =\n")
    assert log_format_wanted(flags={}, environ={}, file=file) == "text"
