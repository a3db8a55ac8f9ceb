"""Which files an export has, and which tensors they have."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from memd.export.safetensors_files import planned_files
from memd.refusal import Refused
from memd_proto.v1 import job_pb2, types_pb2

if TYPE_CHECKING:
    from memd.export.file import File

PARAMETER = types_pb2.SHARD_KIND_PARAMETER
BLOB = types_pb2.SHARD_KIND_BLOB
BUFFER = types_pb2.SHARD_KIND_BUFFER
VALUE = job_pb2.SNAPSHOT_PART_VALUE


def shard(
    name: str,
    kind: types_pb2.ShardKind = PARAMETER,
    shape: tuple[int, ...] = (4, 2),
    dtype: types_pb2.DType = types_pb2.D_TYPE_FLOAT32,
    **fields: Any,
) -> job_pb2.SnapshotShard:
    spec = types_pb2.ShardSpec(name=name, kind=kind, dtype=dtype, shape=shape)
    return job_pb2.SnapshotShard(spec=spec, **{"written": True, **fields})


def planned(*shards: job_pb2.SnapshotShard, file_bytes_max: int = 1 << 40) -> dict[str, File]:
    files = planned_files(shards, metadata={"format": "pt"}, file_bytes_max=file_bytes_max)
    return {file.name: file for file in files}


def header(file: File) -> dict[str, Any]:
    text: dict[str, Any] = json.loads(file.writes[0][1][8:])
    del text["__metadata__"]
    return text


def test_names_are_those_of_the_model_and_its_optimizer() -> None:
    files = planned(
        shard("w", has_moments=True, generation=3),
        shard("frozen"),
        shard("unwritten", written=False),
        shard("mean", BUFFER),
        shard("mean@staged", BUFFER),
        shard("memd.tracked.4096", BUFFER),
        shard("notes", BLOB),
        shard("@offload/0", BLOB),
        shard("@load/3", BLOB),
    )
    assert list(files) == ["model.safetensors", "optimizer.safetensors", "blobs.safetensors"]
    assert set(header(files["model.safetensors"])) == {"w", "frozen", "mean"}
    states = header(files["optimizer.safetensors"])
    assert set(states) == {"w.exp_avg", "w.exp_avg_sq", "w.step"}
    assert states["w.step"] == {"dtype": "I64", "shape": [], "data_offsets": [0, 8]}
    assert files["optimizer.safetensors"].writes[1][1] == (3).to_bytes(8, "little")
    assert set(header(files["blobs.safetensors"])) == {"memd.tracked.4096", "notes"}
    assert set(files["model.safetensors"].begins) == {(0, VALUE), (1, VALUE), (3, VALUE)}


def test_tiles_of_one_parameter_are_one_tensor() -> None:
    files = planned(
        shard("w[3:5]", shape=(2, 7)),
        shard("w[0:3]", shape=(3, 7)),
        shard("alone[0:3]", shape=(3,)),
        shard("hole[0:3]", shape=(3,)),
        shard("hole[4:5]", shape=(1,)),
        shard("taken[0:1]", shape=(1,)),
        shard("taken[1:2]", shape=(1,)),
        shard("taken", shape=(1,)),
    )
    tensors = header(files["model.safetensors"])
    assert tensors.pop("w")["shape"] == [5, 7]
    assert set(tensors) == {
        *("alone[0:3]", "hole[0:3]", "hole[4:5]", "taken[0:1]", "taken[1:2]", "taken")
    }
    begins = files["model.safetensors"].begins
    assert begins[0, VALUE] == begins[1, VALUE] + 3 * 7 * 4


def test_a_frozen_parameter_has_its_name_dtype_and_shape_in_the_model() -> None:
    half = types_pb2.D_TYPE_BFLOAT16
    files = planned(
        shard("int:uint8[5,3]", shape=(8,), dtype=half),
        shard("one:bool[]", shape=(1,), dtype=half),
        shard("none:float8_e4m3fn[0,3]", shape=(0,), dtype=half),
        shard("tiled[0:2]:float16[2,3]", shape=(6,), dtype=half),
        shard("tiled[2:3]:float16[1,3]", shape=(3,), dtype=half),
        # Others, which only look so.
        shard("other:uint8[5,4]", shape=(8,), dtype=half),
        shard("plain:uint8[4]", shape=(2,)),
        shard("word:uint9[4]", shape=(2,), dtype=half),
        shard("trained:uint8[4]", shape=(2,), dtype=half, has_moments=True),
        shard("both", shape=(2,)),
        shard("both:uint8[4]", shape=(2,), dtype=half),
        shard("twice:uint8[4]", shape=(2,), dtype=half),
        shard("twice:int8[4]", shape=(2,), dtype=half),
    )
    tensors = header(files["model.safetensors"])
    found = {name: (each["dtype"], each["shape"]) for name, each in tensors.items()}
    assert found == {
        "int": ("U8", [5, 3]),
        "one": ("BOOL", []),
        "none": ("F8_E4M3", [0, 3]),
        "tiled": ("F16", [3, 3]),
        "other:uint8[5,4]": ("BF16", [8]),
        "plain:uint8[4]": ("F32", [2]),
        "word:uint9[4]": ("BF16", [2]),
        "trained:uint8[4]": ("BF16", [2]),
        "both": ("F32", [2]),
        "both:uint8[4]": ("BF16", [2]),
        "twice:uint8[4]": ("BF16", [2]),
        "twice:int8[4]": ("BF16", [2]),
    }
    file = files["model.safetensors"]
    # The job has 16 bytes of it.
    assert file.ends[0, VALUE] == file.begins[0, VALUE] + 15
    assert file.begins[4, VALUE] == file.begins[3, VALUE] + 12


def test_a_dtype_that_such_files_do_not_have_is_refused() -> None:
    with pytest.raises(Refused, match=r"no dtype for the frozen parameter 'wide'.*--format dcp"):
        planned(shard("wide:complex128[2]", shape=(16,), dtype=types_pb2.D_TYPE_BFLOAT16))


def test_larger_sets_are_shards_with_an_index() -> None:
    files = planned(shard("a"), shard("b"), shard("c", shape=(100,)), file_bytes_max=64)
    names = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    # As huggingface_hub splits: what is larger than a file goes first of those that are open.
    assert sorted(files) == [*names, "model.safetensors.index.json"]
    index = json.loads(files["model.safetensors.index.json"].writes[0][1])
    assert index["weight_map"] == {"a": names[1], "b": names[1], "c": names[0]}
    assert index["metadata"] == {"total_size": 32 + 32 + 400}
    assert set(header(files[names[0]])) == {"c"}


def test_a_job_without_tensors_is_an_empty_model() -> None:
    files = planned()
    assert header(files["model.safetensors"]) == {}
    assert len(files) == 1


def test_a_snapshot_within_a_load_and_impossible_names_are_refused() -> None:
    with pytest.raises(Refused, match="made while a load moved its values"):
        planned(shard("w"), shard("@load/plan", BLOB))
    with pytest.raises(Refused, match="can have the name '__metadata__'"):
        planned(shard("__metadata__"))
