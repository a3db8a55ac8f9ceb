"""Sessions: addresses, errors, attaching, and tensors over gRPC; the daemon is faked."""

from __future__ import annotations

import gc
import os
import socket
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock
from weakref import ref

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim.swa_utils import AveragedModel

import memd_client
import memd_native
from memd_client.base.address import EmbeddedAddress, UnixAddress, parse_address
from memd_client.base.sizes import format_size, parse_size
from memd_client.connection.attach import AttachConnection
from memd_client.connection.control import Control
from memd_client.core.job import Job
from memd_client.errors import from_code
from memd_client.session import Session
from memd_proto.v1 import attach_pb2, session_pb2, types_pb2
from tests.unit.client_cases import Mlp, loss_of
from tests.unit.fake_session import FakeDaemon
from tests.unit.track_cases import Kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def average(averaged: AveragedModel, model: nn.Module, step: int) -> None:
    del step
    averaged.update_parameters(model)


class TestSizesAndAddresses:
    @pytest.mark.parametrize(
        ("text", "size_bytes"),
        [("1GiB", 1 << 30), ("1.5 MiB", 3 << 19), ("7B", 7), (4096, 4096), ("12GB", 12 * 10**9)],
    )
    def test_sizes_have_units(self, text: str | int, size_bytes: int) -> None:
        assert parse_size(text, name="host") == size_bytes

    @pytest.mark.parametrize("text", ["1", "1G", "GiB", "-1GiB", "0B", 0, -5, 1.5, True, "1 giga"])
    def test_what_is_no_size_is_refused_by_name(self, text: Any) -> None:
        with pytest.raises(memd_client.InvalidArgument, match=r"host_bytes.*" + str(text)):
            parse_size(text, name="host_bytes")

    def test_sizes_are_printed_in_the_largest_unit(self) -> None:
        sizes = [format_size(size) for size in (0, 1023, 1 << 20, 3 << 29, 5 << 40)]
        assert sizes == ["0 B", "1023 B", "1 MiB", "1.5 GiB", "5 TiB"]

    def test_addresses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MEMD_ADDRESS", raising=False)
        default = parse_address(None)
        assert default == UnixAddress(socket=Path("/run/memd/memd.sock"))
        assert isinstance(default, UnixAddress)
        assert default.attach_socket == Path("/run/memd/attach.sock")
        monkeypatch.setenv("MEMD_ADDRESS", "unix:/srv/m.sock")
        assert parse_address(None) == parse_address("unix:///srv/m.sock")
        assert parse_address("embedded:") == EmbeddedAddress()
        assert parse_address("embedded:/data/x%20y?host=1GiB&nvme=100GiB") == EmbeddedAddress(
            data=Path("/data/x y"), host_bytes=1 << 30, nvme_bytes=100 << 30
        )

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("unix:memd.sock", "absolute path"),
            ("memd", "an address is"),
            ("embedded:here", "absolute path"),
            ("embedded:/x?hots=1GiB", "did you mean 'host'"),
            ("embedded:/x?host=1", "needs a number and one of the units"),
            ("embedded:/x?host", "name=value"),
        ],
    )
    def test_what_is_no_address_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(memd_client.InvalidArgument, match=message):
            parse_address(text)

    def test_tcp_is_not_there_yet(self) -> None:
        with pytest.raises(memd_client.NotYet, match="TCP"):
            memd_client.connect("node7:7070", job="x")


class TestConnect:
    @pytest.mark.parametrize(
        "text", ["", "every:", "every:x", "every:01", "every:2147483649", "Step"]
    )
    def test_an_unknown_durability_is_refused_with_what_is_allowed(self, text: str) -> None:
        with pytest.raises(memd_client.InvalidArgument, match="every:k") as refused:
            memd_client.connect("unix:///nobody", job="gpt", durability=text)
        assert repr(text) in str(refused.value)

    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"durability": "every:0"}, memd_client.InvalidArgument, "'every:0'"),
            ({"world_size": 2}, memd_client.InvalidArgument, "world_size is 2, and no process"),
            ({"rank": 3}, memd_client.InvalidArgument, "rank 3"),
            ({"host_bytes": "4"}, memd_client.InvalidArgument, "host_bytes"),
            ({"nvme_bytes": -1}, memd_client.InvalidArgument, "nvme_bytes"),
            ({"job": ""}, memd_client.InvalidArgument, "name"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_bad_arguments_are_refused_before_anything_is_opened(
        self, settings: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            memd_client.connect(**{"address": "unix:///nowhere", "job": "x", **settings})

    def test_a_rank_without_a_process_group_is_refused_before_it_trains_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(
            memd_client.InvalidArgument, match=r"WORLD_SIZE is 2.*init_process_group.*world_size=1"
        ):
            memd_client.connect("unix:///nowhere", job="x")

    @pytest.mark.parametrize("started", ["1", "", "many"])
    def test_a_process_that_works_alone_needs_no_process_group(
        self, started: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", started)
        with pytest.raises(memd_client.DaemonUnavailable):
            memd_client.connect("unix:///nowhere", job="x")
        monkeypatch.setenv("WORLD_SIZE", "8")
        with pytest.raises(memd_client.DaemonUnavailable):
            memd_client.connect("unix:///nowhere", job="x", world_size=1)

    def test_no_daemon_is_an_error_that_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(memd_client.DaemonUnavailable, match=r"memd serve.*embedded:"):
            memd_client.connect(f"unix://{tmp_path}/memd.sock", job="x")

    def test_another_protocol_version_is_refused_with_both_named(self, tmp_path: Path) -> None:
        welcome = attach_pb2.Welcome(protocol_version=99, daemon_version="9.9")
        with (
            attach_server(tmp_path, welcome) as address,
            pytest.raises(memd_client.InvalidArgument, match=r"same version.*99 there.*9\.9"),
        ):
            AttachConnection(address)

    def test_the_newest_version_of_both_ranges_is_spoken(self, tmp_path: Path) -> None:
        here = memd_native.PROTOCOL_VERSION
        spoken = types_pb2.ProtocolRange(oldest=memd_native.PROTOCOL_OLDEST, newest=here + 3)
        newer = attach_pb2.Welcome(protocol_version=here + 3, protocol_range=spoken, token="t")
        with attach_server(tmp_path, newer) as address:
            connection = AttachConnection(address)
            assert (connection.protocol_version, connection.token) == (here, "t")
            connection.close()

    def test_a_range_without_a_version_of_ours_is_refused_with_both_named(
        self, tmp_path: Path
    ) -> None:
        here = memd_native.PROTOCOL_VERSION
        spoken = types_pb2.ProtocolRange(oldest=here + 1, newest=here + 3)
        newer = attach_pb2.Welcome(protocol_version=here + 3, protocol_range=spoken)
        with (
            attach_server(tmp_path, newer) as address,
            pytest.raises(
                memd_client.InvalidArgument, match=rf"{here} here, {here + 1} to {here + 3} there"
            ),
        ):
            AttachConnection(address)

    def test_words_of_a_newer_daemon_that_are_not_known_here_are_no_obstacle(
        self, tmp_path: Path
    ) -> None:
        welcome = attach_pb2.Welcome(protocol_version=memd_native.PROTOCOL_VERSION, token="t")
        grown = attach_pb2.Welcome.FromString(welcome.SerializeToString() + b"\xba\x3e\x03new")
        assert grown != welcome
        with attach_server(tmp_path, grown) as address:
            connection = AttachConnection(address)
            assert connection.token == "t"
            connection.close()

    def test_a_refusal_is_passed_on(self, tmp_path: Path) -> None:
        welcome = attach_pb2.Welcome(
            protocol_version=memd_native.PROTOCOL_VERSION, refusal="user 7 is not in group memd"
        )
        with (
            attach_server(tmp_path, welcome) as address,
            pytest.raises(memd_client.PermissionDenied, match="user 7"),
        ):
            AttachConnection(address)

    def test_a_daemon_that_hangs_up_is_an_error(self, tmp_path: Path) -> None:
        with (
            attach_server(tmp_path, None) as address,
            pytest.raises(memd_client.DaemonUnavailable, match="closed the attach socket"),
        ):
            AttachConnection(address)

    def test_descriptors_of_another_session_are_not_taken(self, tmp_path: Path) -> None:
        welcome = attach_pb2.Welcome(protocol_version=memd_native.PROTOCOL_VERSION, token="t")
        wrong = attach_pb2.Descriptors(kind=attach_pb2.Descriptors.KIND_SESSION, session_id=8)
        with attach_server(tmp_path, welcome, wrong) as address:
            connection = AttachConnection(address)
            assert connection.daemon_process_id == os.getpid()
            with pytest.raises(memd_client.DaemonUnavailable, match="session 7"):
                connection.session_descriptors(7)
            connection.close()


@contextmanager
def attach_server(
    folder: Path, welcome: attach_pb2.Welcome | None, *packets: attach_pb2.Descriptors
) -> Iterator[UnixAddress]:
    """Answers one client on attach.sock with `welcome` and `packets`, or hangs up."""
    address = UnixAddress(socket=folder / "memd.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address.attach_socket))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                for packet in (welcome, *packets):
                    if packet is not None:
                        connection.send(packet.SerializeToString())
                if welcome is not None:
                    connection.recv(1)  # until the client has hung up

        thread = threading.Thread(target=serve)
        thread.start()
        yield address
        thread.join()


class TestErrors:
    CODES = (
        (1, memd_client.InvalidArgument, ValueError),
        (2, memd_client.UnknownName, KeyError),
        (3, memd_client.InvalidArgument, ValueError),
        (4, memd_client.PermissionDenied, PermissionError),
        (5, memd_client.CapacityError, memd_client.MemdError),
        (6, memd_client.DeviceError, OSError),
        (7, memd_client.IntegrityError, memd_client.MemdError),
        (8, memd_client.SessionFenced, memd_client.MemdError),
        (9, memd_client.DeadlineExceeded, TimeoutError),
        (10, memd_client.DaemonUnavailable, memd_client.MemdError),
        (11, memd_client.NotYet, NotImplementedError),
        (77, memd_client.DaemonFailed, memd_client.MemdError),
    )

    @pytest.mark.parametrize(("code", "kind", "base"), CODES)
    def test_each_code_has_its_class(
        self, code: int, kind: type[Exception], base: type[Exception]
    ) -> None:
        error = from_code(code, "shard 'x': it went wrong", 5)
        assert type(error) is kind
        assert isinstance(error, memd_client.MemdError)
        assert isinstance(error, base)
        assert str(error) == "shard 'x': it went wrong"
        if isinstance(error, memd_client.DeviceError):
            assert error.errno == 5

    @pytest.mark.parametrize(
        ("status", "detail", "kind"),
        [
            (grpc.StatusCode.FAILED_PRECONDITION, types_pb2.ErrorDetail(code=6), OSError),
            (grpc.StatusCode.UNKNOWN, types_pb2.ErrorDetail(code=7), memd_client.IntegrityError),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, None, memd_client.CapacityError),
            (grpc.StatusCode.UNAVAILABLE, None, memd_client.DaemonUnavailable),
            (grpc.StatusCode.UNIMPLEMENTED, None, memd_client.NotYet),
            (grpc.StatusCode.UNKNOWN, None, memd_client.DaemonFailed),
        ],
    )
    def test_a_failed_call_raises_what_the_daemon_said(
        self, status: grpc.StatusCode, detail: types_pb2.ErrorDetail | None, kind: type[Exception]
    ) -> None:
        class Failed(grpc.RpcError):
            def code(self) -> grpc.StatusCode:
                return status

            def details(self) -> str:
                return "the reason"

            def trailing_metadata(self) -> Any:
                return [("memd-error-bin", detail.SerializeToString())] if detail else []

        def call(request: Any, *, timeout: float, metadata: Any) -> Any:
            assert timeout > 0
            assert metadata == (("memd-token", "secret"),)
            raise Failed

        control = Control(address="unix:///nowhere", token="secret")
        with pytest.raises(kind, match="the reason"):
            control._call(call, session_pb2.SyncRequest(), 1.0)

    @pytest.mark.parametrize(("told_ms", "retry_after_s"), [(1500, 1.5), (0, None)])
    def test_a_refusal_says_when_the_call_may_be_made_again(
        self, told_ms: int, retry_after_s: float | None
    ) -> None:
        class Refused(grpc.RpcError):
            def code(self) -> grpc.StatusCode:
                return grpc.StatusCode.RESOURCE_EXHAUSTED

            def details(self) -> str:
                return "too many streams at once"

            def trailing_metadata(self) -> Any:
                detail = types_pb2.ErrorDetail(code=5, retry_after_ms=told_ms)
                return [("memd-error-bin", detail.SerializeToString())]

        def call(request: Any, *, timeout: float, metadata: Any) -> Any:
            raise Refused

        control = Control(address="unix:///nowhere", token="secret")
        with pytest.raises(memd_client.CapacityError) as error:
            control._call(call, session_pb2.SyncRequest(), 1.0)
        assert error.value.retry_after_s == retry_after_s

    def test_a_daemon_that_is_gone_is_an_error_that_says_so(self, tmp_path: Path) -> None:
        control = Control(address=f"unix://{tmp_path}/memd.sock", token="t")
        with pytest.raises(memd_client.DaemonUnavailable, match="is gone; start it"):
            control.sync(session_pb2.SyncRequest())
        control.close()


def streaming_session(daemon: FakeDaemon) -> Session:
    """One that shares no memory."""
    return Session(
        Job(
            "fake",
            attached=session_pb2.AttachResponse(session_id=1),
            control=daemon,
            leases=None,
            daemon_process_id=1,
            close_connection=lambda: None,
        )
    )


class TestWithoutSharedMemory:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
    @pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1_300_000,)], ids=str)
    def test_get_gives_what_was_put(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        session = streaming_session(FakeDaemon())
        tensor = (torch.rand(shape) * 3).to(dtype)
        session.put("x", tensor)
        got = session.get("x")
        assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(got, tensor)

    def test_prefetch_only_checks_names(self) -> None:
        session = streaming_session(FakeDaemon())
        session.put("x", torch.ones(2))
        session.prefetch(["x"])
        with pytest.raises(KeyError, match="'y'"):
            session.prefetch(["x", "y"])

    def test_offloading_is_refused(self) -> None:
        session = streaming_session(FakeDaemon())
        with pytest.raises(memd_client.InvalidArgument, match="needs shared memory"):
            memd_client.offload(Mlp(), session)
        with pytest.raises(memd_client.InvalidArgument, match="needs shared memory"):
            memd_client.AdamW(Mlp().parameters(), session=session)
        with pytest.raises(memd_client.InvalidArgument, match="needs shared memory"):
            session.track(rng=True)
        assert session.resume() == 0


class TestSession:
    @pytest.mark.parametrize("name", ["maximize", "amsgrad"])
    def test_a_daemon_that_is_older_than_a_setting_is_not_asked_for_it(self, name: str) -> None:
        """It would not see the field, and minimize, or update without a maximum."""
        older = rf"older than {name}.*update it.*{name} False"
        daemon = FakeDaemon()
        setattr(daemon, f"can_{name}", False)
        setting: dict[str, Any] = {name: True}
        with daemon.session() as session:
            parameter = torch.nn.Parameter(torch.ones(3))
            with pytest.raises(memd_client.InvalidArgument, match=older):
                memd_client.AdamW([parameter], session=session, **setting)
            optimizer = memd_client.AdamW([parameter], session=session)
            parameter.grad = torch.ones(3)
            optimizer.param_groups[0][name] = True
            with pytest.raises(memd_client.InvalidArgument, match=older):
                optimizer.step()
            loaded = optimizer.state_dict()
            optimizer.param_groups[0][name] = False
            with pytest.raises(memd_client.InvalidArgument, match=older):
                optimizer.load_state_dict(loaded)
            assert session.committed_step == 0
            optimizer.step()
            assert session.committed_step == 1

    def test_an_older_daemon_gets_no_maximum(self) -> None:
        """It would drop it without a word."""
        with FakeDaemon(can_amsgrad=False).session() as session:
            parameter = torch.nn.Parameter(torch.ones(3))
            optimizer = memd_client.AdamW([parameter], session=session)
            state = optimizer.state_dict()
            state["state"][0]["max_exp_avg_sq"] = torch.ones(3)
            with pytest.raises(memd_client.InvalidArgument, match="older than amsgrad"):
                optimizer.load_state_dict(state)
            assert not optimizer.state_dict()["state"][0]["step"]

    def test_a_daemon_that_does_not_say_what_maxima_take_gets_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unknown(_: FakeDaemon, request: session_pb2.GetMaximaBytesRequest) -> Any:
            raise memd_client.NotYet(f"no method for {request.session_id}")

        monkeypatch.setattr(FakeDaemon, "get_maxima_bytes", unknown)
        with FakeDaemon().session() as session:
            model = memd_client.offload(torch.nn.Linear(2, 2, bias=False), session)
            optimizer = memd_client.AdamW(model.parameters(), amsgrad=True)
            moments = dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), torch.ones(2, 2))
            state = optimizer.state_dict()
            state["state"] = {0: {"step": torch.tensor(3.0), **moments}}
            with pytest.raises(memd_client.NotYet, match=r"older than this client.*update it"):
                optimizer.load_state_dict(state)
            assert not optimizer.state_dict()["state"][0]["step"]

    def test_an_older_daemon_is_given_no_load(self) -> None:
        """It would leave a part of it if this process were killed."""
        with FakeDaemon(can_load_in_place=False).session() as session:
            model = memd_client.offload(torch.nn.Linear(4, 4, bias=False), session)
            optimizer = memd_client.AdamW(model.parameters())
            moments = {name: torch.rand(4, 4) for name in ("exp_avg", "exp_avg_sq")}
            state = optimizer.state_dict()
            state["state"] = {0: {"step": torch.tensor(3.0), **moments}}
            with pytest.raises(memd_client.NotYet, match=r"older than this client.*update it"):
                optimizer.load_state_dict(state)
            assert not optimizer.state_dict()["state"][0]["step"]

    def test_an_older_daemon_gets_no_masters(self, tmp_path: Path) -> None:
        """It would not see them, and training would go on from other numbers."""
        names = ("exp_avg", "exp_avg_sq", "master")
        moments = {f"weight.{name}": torch.ones(2, 2) for name in names}
        save_file({**moments, "weight.step": torch.tensor(3)}, tmp_path / "states")
        with FakeDaemon().session() as session:
            model = memd_client.offload(torch.nn.Linear(2, 2, bias=False).bfloat16(), session)
            optimizer = memd_client.AdamW(model.parameters())
            with pytest.raises(memd_client.NotYet, match=r"older than this.*or pass masters=False"):
                memd_client.load_optimizer_safetensors(optimizer, tmp_path / "states")
            assert not optimizer.state_dict()["state"][0]["step"]

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_an_older_daemon_gives_no_masters(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A file without them would look like one with them."""
        with FakeDaemon().session() as session:
            model = memd_client.offload(torch.nn.Linear(2, 2, bias=False).bfloat16(), session)
            optimizer = memd_client.AdamW(model.parameters())
            with pytest.raises(memd_client.NotYet, match=r"older than this.*or pass masters=False"):
                memd_client.save_optimizer_safetensors(optimizer, tmp_path / "states")
            assert list(tmp_path.iterdir()) == []
            memd_client.save_optimizer_safetensors(optimizer, tmp_path / "states", masters=False)
            assert "weight.master" not in load_file(tmp_path / "states")
            assert not caplog.records
            for _ in range(2):
                writer = memd_client.checkpoint.Writer(tmp_path / "saved")
                save({"optimizer": optimizer.state_dict()}, storage_writer=writer)
        told = [each.message for each in caplog.records if "fp32 values of" in each.message]
        assert len(told) == 1

    def test_a_reset_is_sent_in_several_messages(self) -> None:
        with FakeDaemon().session() as session:
            model = memd_client.offload(torch.nn.Linear(400, 400, bias=False), session)
            optimizer = memd_client.AdamW(model.parameters())
            moments = {name: torch.rand(400, 400) for name in ("exp_avg", "exp_avg_sq")}
            state = optimizer.state_dict()
            state["state"] = {0: {"step": torch.tensor(3.0), **moments}}
            optimizer.load_state_dict(state)
            optimizer.reset_state()
            found = optimizer.state_dict()["state"][0]
            assert not found["step"]
            assert not any(found[name].any() for name in moments)

    def test_a_quota_without_room_for_maxima_makes_no_step_with_amsgrad(self) -> None:
        with FakeDaemon(maxima_max=0).session() as session:
            parameter = torch.nn.Parameter(torch.ones(3))
            with pytest.raises(memd_client.CapacityError, match="maxima"):
                memd_client.AdamW([parameter], session=session, amsgrad=True)
            optimizer = memd_client.AdamW([parameter], session=session)
            parameter.grad = torch.ones(3)
            optimizer.param_groups[0]["amsgrad"] = True
            with pytest.raises(memd_client.CapacityError, match="maxima"):
                optimizer.step()
            assert session.committed_step == 0
            optimizer.param_groups[0]["amsgrad"] = False
            optimizer.step()
            assert "max_exp_avg_sq" not in optimizer.state_dict()["state"][0]

    def test_closing_makes_durable_what_was_put(self) -> None:
        daemon = FakeDaemon()
        with daemon.session() as session:
            session.put("x", torch.ones(2))
            assert "sync" not in daemon.calls
        # The leases end first, the control plane last.
        assert daemon.calls == ["declare", "sync", "close", "detach", "close"]

    def test_a_sync_that_failed_is_made_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        daemon = FakeDaemon()
        session = daemon.session()
        session.put("x", torch.ones(2))
        with monkeypatch.context() as patch:
            patch.setattr(daemon, "sync", Mock(side_effect=from_code(5, "the disk is full")))
            with pytest.raises(memd_client.CapacityError):
                session.commit()
        session.commit()
        session.commit()
        assert daemon.calls.count("sync") == 1

    def test_what_is_put_while_a_sync_runs_is_of_the_next_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        daemon = FakeDaemon()
        session = daemon.session()
        session.put("x", torch.ones(2))
        sync = daemon.sync

        def sync_while_another_thread_puts(
            request: session_pb2.SyncRequest,
        ) -> session_pb2.SyncResponse:
            response = sync(request)
            session.put("y", torch.ones(2))
            return response

        with monkeypatch.context() as patch:
            patch.setattr(daemon, "sync", sync_while_another_thread_puts)
            session.commit()
        session.commit()
        session.commit()
        assert daemon.calls.count("sync") == 2

    def test_dropping_the_job_ends_the_session(self) -> None:
        daemon = FakeDaemon()
        session = daemon.session()
        session.put("x", torch.ones(2))
        session.drop_job()
        assert daemon.calls[-3:] == ["detach", "drop_job fake", "close"]
        with pytest.raises(memd_client.MemdError, match="closed"):
            session.put("x", torch.ones(2))

    @pytest.mark.parametrize(
        ("code", "calls"), [(8, ["drop_job fake", "close"]), (10, ["close"])], ids=str
    )
    def test_a_job_whose_session_has_ended_is_dropped(
        self, monkeypatch: pytest.MonkeyPatch, code: int, calls: list[str]
    ) -> None:
        daemon = FakeDaemon()
        session = daemon.session()

        def detach(_: Any) -> None:
            raise from_code(code, "there is no such session")

        monkeypatch.setattr(daemon, "detach", detach)
        with nullcontext() if code == 8 else pytest.raises(memd_client.DaemonUnavailable):
            session.drop_job()
        assert daemon.calls == ["close", *calls]
        with pytest.raises(memd_client.MemdError, match="closed"):
            session.put("x", torch.ones(2))

    def test_deleting_what_is_not_there_does_not_ask_for_it(self) -> None:
        daemon = FakeDaemon()
        with daemon.session() as session:
            with pytest.raises(memd_client.UnknownName, match="'x'"):
                session.delete("x")
            assert "delete" not in daemon.calls
            session.put("x", torch.ones(2))
            session.delete("x")
        with daemon.session() as session, pytest.raises(memd_client.UnknownName, match="'x'"):
            session.delete("x")

    def test_prefetch_reaches_the_daemon(self) -> None:
        daemon = FakeDaemon()
        session = daemon.session()
        session.put("x", torch.ones(2))
        session.prefetch(["x"])
        assert daemon.calls[-1] == "prefetch x"

    def test_statistics_count_steps(self) -> None:
        session = FakeDaemon().session()
        model = memd_client.offload(Mlp(), session)
        optimizer = memd_client.AdamW(model.parameters())
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
        assert session.statistics().committed_step == 1  # the second is on its way
        assert session.committed_step == 2
        statistics = session.statistics()
        assert statistics.step_seconds == 1.0
        assert (statistics.step_count, statistics.committed_step) == (2, 2)
        assert (statistics.step_read_bytes, statistics.step_written_bytes) == (2, 4)
        assert statistics.parameter_count == 4
        assert statistics.lease_count > 8
        assert statistics.lease_resident_count == statistics.lease_count

    def test_a_name_put_anew_by_another_session_is_found(self) -> None:
        daemon = FakeDaemon()
        mine, other = daemon.session(), daemon.session()
        mine.put("x", torch.ones(2))
        other.delete("x")
        other.put("x", torch.zeros(3, dtype=torch.int64))
        assert torch.equal(mine.get("x"), torch.zeros(3, dtype=torch.int64))

    @pytest.mark.parametrize("resumes", [False, True])
    def test_a_session_that_nobody_refers_to_ends_without_the_garbage_collector(
        self, resumes: bool
    ) -> None:
        gc.collect()
        gc.disable()
        try:
            daemon = FakeDaemon()
            session = daemon.session()
            model = memd_client.offload(nn.BatchNorm1d(4), session)
            session.track(rng=True)
            if resumes:
                assert session.resume() == 0
            session.commit(wait=True)
            job = ref(session.transaction.job)
            del model, session
            assert job() is None
        finally:
            gc.enable()

    def test_what_it_tracks_and_calls_after_commits_does_not_keep_a_session(self) -> None:
        """A scheduler refers to its optimizer, an average of weights to the model, and both to the
        job."""
        gc.collect()
        gc.disable()
        try:
            session = FakeDaemon().session()
            model = memd_client.offload(Mlp(), session)
            optimizer = memd_client.AdamW(model.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            averaged = AveragedModel(model)
            session.track(scheduler=scheduler, averaged=averaged)
            session.after_commit(partial(average, averaged, model))
            loss_of(model).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            session.commit(wait=True)
            job = ref(session.transaction.job)
            del model, optimizer, scheduler, averaged, session
            assert job() is None
        finally:
            gc.enable()

    def test_the_session_keeps_what_nobody_else_does(self) -> None:
        daemon = FakeDaemon()
        session = daemon.session()
        calls: list[int] = []
        session.track(kept=Kept("tracked by nobody else"))
        session.after_commit(calls.append)
        gc.collect()
        session.commit(wait=True)
        assert calls == [1]
        again, kept = daemon.session(), Kept()
        again.track(kept=kept)
        assert again.resume() == 1
        assert kept.state == "tracked by nobody else"

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_forked_child_may_not_use_the_session(self) -> None:
        daemon = FakeDaemon()
        session = daemon.session()
        model = memd_client.offload(Mlp(), session)
        optimizer = memd_client.AdamW(model.parameters())
        loss_of(model).backward()
        optimizer.step()  # and its answer is waited for in the parent
        calls = len(daemon.calls)
        child = os.fork()
        if child == 0:
            status = 0
            uses: list[Callable[[], object]] = [
                lambda: session.get("x"),
                lambda: loss_of(model),
                lambda: session.committed_step,
                lambda: session.durable_step,
                optimizer.state_dict,
                session.commit,
                session.drop_job,
            ]
            for use in uses:
                try:
                    use()
                    status = 1
                except memd_client.MemdError as error:
                    status |= 0 if "connect again in the child" in str(error) else 2
            session.close()  # does nothing
            os._exit(status if (len(daemon.calls), daemon.committed_step) == (calls, 0) else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        loss_of(model)
