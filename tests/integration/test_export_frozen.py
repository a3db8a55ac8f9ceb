"""Frozen parameters of other dtypes, which memd has as bytes, are themselves in exports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

import memd_client
from memd.export.contents import CODES_OF_FROZEN
from memd_client.base.dtypes import FROZEN_DTYPES
from tests.integration.test_snapshot_export import job_of
from tests.integration.test_snapshots import memd

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.daemons import Daemon

NOT_IN_SAFETENSORS = (torch.complex128, torch.float4_e2m1fn_x2)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Frozen(nn.Module):
    """A trained weight beside frozen parameters of other dtypes, most with odd numbers of bytes."""

    def __init__(self, dtypes: Sequence[torch.dtype], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trained = nn.Linear(512, 8)
        self.frozen = nn.ParameterDict()
        for dtype in dtypes:
            data = torch.randint(0, 2, (5, 3 * dtype.itemsize), dtype=torch.uint8)
            if dtype is not torch.bool:
                data = torch.randint(0, 256, data.shape, dtype=torch.uint8)
            self.frozen[str(dtype)[6:]] = nn.Parameter(data.view(dtype), requires_grad=False)
        data = torch.randint(0, 256, (300, 3001), dtype=torch.uint8)  # several tiles
        self.frozen["large"] = nn.Parameter(data, requires_grad=False)
        self.one = nn.Parameter(torch.tensor(seed, dtype=torch.int8), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.trained(inputs)
        return output

    def bits(self) -> dict[str, bytes]:
        """With dtypes and shapes."""
        return {
            f"{name} {each.dtype} {list(each.shape)}": (
                each.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
            for name, each in self.state_dict().items()
        }


@pytest.mark.parametrize("file_format", ["safetensors", "dcp"])
def test_frozen_parameters_have_the_names_of_the_model(
    daemon: Daemon, tmp_path: Path, file_format: str
) -> None:
    path = tmp_path / "out"
    dtypes = sorted(FROZEN_DTYPES, key=str)
    if file_format == "safetensors":
        dtypes = [each for each in dtypes if each not in NOT_IN_SAFETENSORS]
    with job_of(daemon, "frozen") as session:
        model = memd_client.offload(Frozen(dtypes, 1), session)
        optimizer = memd_client.AdamW(model.trained.parameters(), lr=1e-2, session=session)
        model(torch.ones(4, 512)).square().mean().backward()
        optimizer.step()
        session.snapshot("kept")
        memd(daemon, "snapshot", "export", "frozen", "kept", str(path), "--format", file_format)
        with memd_client.gather(model):
            wanted = model.bits()
    plain = Frozen(dtypes, 2)
    assert plain.bits() != wanted
    if file_format == "safetensors":
        plain.load_state_dict(load_file(path / "model.safetensors"))
    else:
        found = {"model": plain.state_dict()}
        load(found, checkpoint_id=path)
    assert plain.bits() == wanted
    if file_format == "safetensors":
        with job_of(daemon, "loaded") as session:
            other = memd_client.offload(Frozen(dtypes, 2), session)
            memd_client.load_safetensors(other, path, session)
            with memd_client.gather(other):
                assert other.bits() == wanted


def test_a_frozen_dtype_that_safetensors_files_lack_is_one_clear_error(
    daemon: Daemon, tmp_path: Path
) -> None:
    with job_of(daemon, "frozen") as session:
        memd_client.offload(Frozen([torch.complex128], 1), session)
        session.commit()
        session.snapshot("kept")
        path = str(tmp_path / "out")
        refused = memd(daemon, "snapshot", "export", "frozen", "kept", path, status=1).stderr
        assert "'frozen.complex128'; export it with --format dcp" in refused
        assert list(tmp_path.iterdir()) == []


def test_the_daemon_knows_every_dtype_that_the_client_freezes() -> None:
    names = {str(dtype).removeprefix("torch.") for dtype in FROZEN_DTYPES}
    assert names == CODES_OF_FROZEN.keys()
