#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "base/checksum.h"
#include "bind/bind.h"
#include "ring/shared_memory.h"
#include "server/server.h"
#include "store/snapshot/snapshot_contents.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace memd {
namespace {

/// The place of a part of a piece in its export's memory, and its bytes; 0 bytes: it is zero.
std::pair<uint64_t, uint64_t> extent_of(const SnapshotPiece& piece,
                                        std::span<const std::byte> part) {
  if (part.empty()) return {0, 0};
  return {piece.offset_bytes(part), part.size()};
}

/// Bytes of a Python object that has a buffer, for as long as this lives.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(view_.buf), static_cast<size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

/// A reading, and what it reads.
struct OpenReading {
  explicit OpenReading(const SnapshotReading& begun) : reading(begun), contents(begun.record) {}
  const SnapshotReading reading;
  const SnapshotContents contents;
};

void bind_snapshot_records(nb::module_& module) {
  module.def(
      "checksum",
      [](const nb::object& bytes) {
        const Buffer buffer(bytes);
        const nb::gil_scoped_release released;
        return record_checksum(buffer.bytes());
      },
      "bytes"_a,
      nb::sig("def checksum(bytes: bytes | memoryview) -> int"),
      "XXH3-64.");
  nb::class_<SnapshotShard>(module, "SnapshotShard", "A shard as a snapshot has it.")
      .def_ro("spec", &SnapshotShard::spec)
      .def_ro("generation", &SnapshotShard::generation)
      .def_ro("written", &SnapshotShard::written)
      .def_ro("has_moments", &SnapshotShard::has_moments);
  nb::class_<SnapshotPlace>(
      module, "SnapshotPlace", "An extent of a blob or buffer, or a tile of a bucket.")
      .def_ro("is_tile", &SnapshotPlace::is_tile)
      .def_ro("owner", &SnapshotPlace::owner, "Bucket of a tile, shard of an extent.")
      .def_ro("index", &SnapshotPlace::index);
  nb::class_<SnapshotRun>(
      module, "SnapshotRun", "Elements of one parameter that lie in a tile one after the other.")
      .def_ro("shard", &SnapshotRun::shard)
      .def_ro("element_in_shard", &SnapshotRun::element_in_shard)
      .def_ro("element_in_tile", &SnapshotRun::element_in_tile)
      .def_ro("element_count", &SnapshotRun::element_count);
  nb::class_<SharedMemory>(module,
                           "SnapshotMemory",
                           "Bytes that the daemon fills for an export, and that whoever gets the "
                           "descriptor can map for reading alone.")
      .def(nb::new_([](uint64_t bytes) {
             return unlocked([bytes]() -> Result<std::shared_ptr<SharedMemory>> {
               auto memory = SharedMemory::create_for_readers("memd-export", bytes);
               if (!memory.is_ok()) return memory.status();
               return std::make_shared<SharedMemory>(std::move(memory).value());
             });
           }),
           "bytes"_a,
           "Pages appear when they are filled.")
      .def_prop_ro("fd", &SharedMemory::fd)
      .def_prop_ro("bytes", &SharedMemory::bytes);
  nb::class_<SnapshotPiece>(module,
                            "SnapshotPiece",
                            "Verified bytes: where each part lies in the export's memory, and how "
                            "many it has. A part that was never written has none, and is zero.")
      .def_prop_ro("value", [](const SnapshotPiece& self) { return extent_of(self, self.value()); })
      .def_prop_ro("exp_avg",
                   [](const SnapshotPiece& self) { return extent_of(self, self.exp_avg()); })
      .def_prop_ro("exp_avg_sq",
                   [](const SnapshotPiece& self) { return extent_of(self, self.exp_avg_sq()); })
      .def_prop_ro("max_exp_avg_sq",
                   [](const SnapshotPiece& self) { return extent_of(self, self.max_exp_avg_sq()); })
      .def_prop_ro(
          "master",
          [](const SnapshotPiece& self) { return extent_of(self, self.master()); },
          "fp32, for bf16 alone: the value with its remainder.");
  nb::class_<OpenReading>(module, "SnapshotReading", "A snapshot that is read; any thread.")
      .def_prop_ro("reading_id", [](const OpenReading& self) { return self.reading.reading_id; })
      .def_prop_ro("snapshot", [](const OpenReading& self) { return self.reading.snapshot; })
      .def_prop_ro("identity", [](const OpenReading& self) { return self.reading.identity; })
      .def_prop_ro("piece_first", [](const OpenReading& self) { return self.reading.piece_first; })
      .def_prop_ro("piece_count",
                   [](const OpenReading& self) { return self.contents.piece_count(); })
      .def_prop_ro("shard_count",
                   [](const OpenReading& self) { return self.contents.shard_count(); })
      .def(
          "shard",
          [](const OpenReading& self, size_t index) {
            if (index >= self.contents.shard_count()) throw nb::index_error();
            return self.contents.shard(index);
          },
          "index"_a)
      .def(
          "place",
          [](const OpenReading& self, uint64_t piece) {
            const auto place = self.contents.place(piece);
            if (!place) throw nb::index_error();
            return *place;
          },
          "piece"_a)
      .def(
          "memory_bytes",
          [](const OpenReading& self, const SnapshotPlace& place) {
            return self.contents.memory_bytes(place);
          },
          "place"_a,
          "That its piece takes: whole blocks, some 5 MiB at most.")
      .def(
          "runs",
          [](const OpenReading& self, const SnapshotPlace& tile) {
            return self.contents.runs(tile.owner, tile.index);
          },
          "tile"_a,
          "In the order of the tile's elements.");
}

}  // namespace

void bind_snapshot_readings(nb::module_& module, nb::class_<Server>& server) {
  bind_snapshot_records(module);
  server
      .def(
          "begin_snapshot_reading",
          [](Server& self,
             uint64_t job_id,
             const std::string& name,
             const std::string& owner,
             uint32_t uid,
             uint32_t pid,
             uint64_t piece_first,
             uint64_t identity) {
            const SnapshotReadingRequest request{.job_id = job_id,
                                                 .name = name,
                                                 .owner = owner,
                                                 .uid = uid,
                                                 .pid = pid,
                                                 .piece_first = piece_first,
                                                 .identity = identity};
            return unlocked([&]() -> Result<std::shared_ptr<OpenReading>> {
              const auto begun = self.snapshots().begin_reading(request);
              if (!begun.is_ok()) return begun.status();
              try {
                return std::make_shared<OpenReading>(begun.value());
              } catch (const std::bad_alloc&) {
                self.snapshots().end_reading(begun.value().reading_id);
                return error(StatusCode::capacity, "the daemon has no memory for an export");
              }
            });
          },
          "job_id"_a,
          "name"_a,
          nb::kw_only(),
          "owner"_a,
          "uid"_a,
          "pid"_a,
          "piece_first"_a = 0,
          "identity"_a = 0,
          "One of a job, and four of an owner at a time. The snapshot cannot be dropped until "
          "end_snapshot_reading().")
      .def(
          "read_snapshot",
          [](Server& self,
             uint64_t reading_id,
             const SnapshotPlace& place,
             const std::shared_ptr<SharedMemory>& memory,
             uint64_t offset_bytes,
             double timeout_s) {
            const PieceMemory into{.memory = memory, .offset_bytes = offset_bytes};
            return std::const_pointer_cast<SnapshotPiece>(unlocked(
                [&] { return self.snapshots().read(reading_id, place, into, timeout_s); }));
          },
          "reading_id"_a,
          "place"_a,
          "memory"_a,
          nb::kw_only(),
          "offset_bytes"_a,
          "timeout_s"_a,
          "Below all other I/O, and verified. The memory lives until it is read.")
      .def(
          "end_snapshot_reading",
          [](Server& self, uint64_t reading_id) { self.snapshots().end_reading(reading_id); },
          "reading_id"_a,
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace memd
