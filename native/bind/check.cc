#include "store/verify/check.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bind/bind.h"
#include "store/format/volume.h"
#include "store/verify/live_check.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace memd {
namespace {

using Progress = nb::typed<nb::callable, void(uint64_t, uint64_t)>;

std::string hex(const std::array<uint8_t, 16>& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : uuid) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::array<uint8_t, 16> uuid_of(const nb::bytes& bytes) {
  std::array<uint8_t, 16> uuid{};
  if (bytes.size() != uuid.size()) throw nb::value_error("a uuid has 16 bytes");
  std::memcpy(uuid.data(), bytes.c_str(), uuid.size());
  return uuid;
}

/// An exception of the callback, such as KeyboardInterrupt, ends the check and is raised.
CheckReport check(const std::vector<std::string>& directories,
                  const std::string& job,
                  const std::optional<Progress>& progress) {
  CheckOptions options{.directories = directories, .job = job, .progress = {}};
  std::optional<nb::python_error> raised;
  options.progress = [&](uint64_t done_bytes, uint64_t all_bytes) {
    const nb::gil_scoped_acquire locked;
    try {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (progress) (*progress)(done_bytes, all_bytes);
    } catch (nb::python_error& thrown) {
      raised.emplace(std::move(thrown));
      return false;
    }
    return true;
  };
  auto result = [&] {
    const nb::gil_scoped_release released;
    return check_volumes(options);
  }();
  if (raised) throw std::move(*raised);
  return value_or_raise(std::move(result));
}

/// A daemon's first start, and nothing else.
double format(const std::vector<std::string>& directories,
              uint64_t nvme_bytes,
              const std::optional<Progress>& progress) {
  VolumeSetOptions options;
  options.directories = directories;
  options.bytes = nvme_bytes;
  if (progress) {
    options.progress = [&](uint64_t done_bytes, uint64_t all_bytes) {
      const nb::gil_scoped_acquire locked;
      (*progress)(done_bytes, all_bytes);
    };
  }
  const auto set = [&] {
    const nb::gil_scoped_release released;
    return VolumeSet::open(options);
  }();
  raise_unless_ok(set.status());
  if (!set.value().formatted) {
    raise(error(StatusCode::already_exists,
                "there are volumes already; nothing was formatted: ",
                set.value().volumes.front().path));
  }
  return set.value().format_seconds;
}

}  // namespace

void bind_check(nb::module_& module) {
  nb::class_<CheckFinding>(module, "CheckFinding")
      .def_ro("is_lost", &CheckFinding::is_lost, "False: a warning, which harms nobody.")
      .def_ro("path", &CheckFinding::path)
      .def_ro("offset_bytes", &CheckFinding::offset_bytes)
      .def_ro("length_bytes", &CheckFinding::length_bytes)
      .def_ro("job", &CheckFinding::job)
      .def_ro("snapshot", &CheckFinding::snapshot, "The job's snapshot; empty: its last commit.")
      .def_ro("shards", &CheckFinding::shards)
      .def_ro("part", &CheckFinding::part)
      .def_ro("reason", &CheckFinding::reason);
  nb::class_<CheckedSnapshot>(module, "CheckedSnapshot")
      .def_ro("name", &CheckedSnapshot::name)
      .def_ro("step", &CheckedSnapshot::step)
      .def_ro("is_lost",
              &CheckedSnapshot::is_lost,
              "Its catalogue is damaged: nothing more is known of it.")
      .def_ro("extent_count", &CheckedSnapshot::extent_count)
      .def_ro("bytes", &CheckedSnapshot::bytes)
      .def_ro("lost_shards", &CheckedSnapshot::lost_shards);
  nb::class_<CheckedJob>(module, "CheckedJob")
      .def_ro("job_id", &CheckedJob::job_id)
      .def_ro("name", &CheckedJob::name)
      .def_ro("step", &CheckedJob::step)
      .def_ro("shard_count", &CheckedJob::shard_count)
      .def_ro("extent_count", &CheckedJob::extent_count)
      .def_ro("bytes", &CheckedJob::bytes)
      .def_ro("lost_shards", &CheckedJob::lost_shards)
      .def_ro("snapshots", &CheckedJob::snapshots);
  nb::class_<CheckedVolume>(module, "CheckedVolume")
      .def_ro("directory", &CheckedVolume::directory)
      .def_ro("path", &CheckedVolume::path)
      .def_ro("bytes", &CheckedVolume::bytes)
      .def_ro("holder", &CheckedVolume::holder, "The daemon that has it open; empty: none.")
      .def_prop_ro("uuid", [](const CheckedVolume& self) { return hex(self.superblock.set_uuid); })
      .def_prop_ro("index", [](const CheckedVolume& self) { return self.superblock.volume_index; })
      .def_prop_ro("sequence", [](const CheckedVolume& self) { return self.superblock.sequence; })
      .def_prop_ro("format",
                   [](const CheckedVolume& self) {
                     const FormatHeader& format = self.superblock.format;
                     return concat(format.major, ".", format.minor);
                   })
      .def_prop_ro(
          "features",
          [](const CheckedVolume& self) {
            const FormatHeader& format = self.superblock.format;
            return std::vector<uint64_t>{
                format.incompatible, format.read_only_compatible, format.compatible};
          },
          "Incompatible, read-only compatible, compatible.")
      .def_prop_ro("damaged_superblock_offsets", [](const CheckedVolume& self) {
        std::vector<uint64_t> offsets;
        for (const SuperblockCopy& copy : self.copies) {
          if (copy.state == CopyState::damaged) offsets.push_back(copy.offset_bytes);
        }
        return offsets;
      });
  nb::class_<CheckReport>(module, "CheckReport")
      .def_ro("volumes", &CheckReport::volumes)
      .def_ro("jobs", &CheckReport::jobs)
      .def_ro("findings", &CheckReport::findings)
      .def_ro("bytes", &CheckReport::bytes)
      .def_ro("seconds", &CheckReport::seconds)
      .def_prop_ro("anything_lost", &CheckReport::anything_lost);
  nb::class_<LiveCheckProgress>(
      module, "LiveCheckProgress", "A daemon's own check, as far as it is.")
      .def_ro("bytes", &LiveCheckProgress::bytes)
      .def_ro("bytes_all", &LiveCheckProgress::bytes_all)
      .def_ro("findings", &LiveCheckProgress::findings)
      .def_ro("report", &LiveCheckProgress::report);
  nb::class_<ListedVolumes>(module, "ListedVolumes")
      .def_ro("volumes", &ListedVolumes::volumes)
      .def_ro("jobs", &ListedVolumes::jobs)
      .def_ro("jobs_unknown", &ListedVolumes::jobs_unknown);
  module.def("check_volumes",
             &check,
             "directories"_a,
             nb::kw_only(),
             "job"_a = "",
             "progress"_a = nb::none(),
             "Reads and compares all that volumes without a daemon should hold. `progress` is told "
             "bytes done and bytes in all, ten times a second; an exception of it ends the check.");
  module.def(
      "list_volumes",
      [](const std::vector<std::string>& directories) {
        return value_or_raise(list_volumes(directories));
      },
      "directories"_a,
      "Superblocks and jobs of a set, which a daemon may have open.");
  module.def(
      "inspect_volume",
      [](const std::string& directory) { return value_or_raise(inspect_alone(directory)); },
      "directory"_a,
      "The superblocks of one volume, whether or not the rest of its set is there.");
  module.def("format_volumes",
             &format,
             "directories"_a,
             nb::kw_only(),
             "nvme_bytes"_a,
             "progress"_a = nb::none(),
             "Makes a set in empty directories as a daemon's first start does; its seconds.");
  module.def(
      "remove_volumes",
      [](const std::vector<std::string>& directories, const nb::bytes& uuid) {
        raise_unless_ok(remove_volumes(directories, uuid_of(uuid)));
      },
      "directories"_a,
      nb::kw_only(),
      "uuid"_a,
      "Removes the volumes of the set `uuid` (16 bytes), which no daemon has open.");
}

}  // namespace memd
