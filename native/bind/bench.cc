#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/checksum.h"
#include "bench/adam_rate.h"
#include "bench/hash_rate.h"
#include "bench/io_rate.h"
#include "bench/lease_rate.h"
#include "bind/bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace memd {
namespace {

IoMix mix_named(const std::string& wanted) {
  if (wanted == "read") return IoMix::read;
  if (wanted == "write") return IoMix::write;
  if (wanted == "mixed") return IoMix::mixed;
  throw nb::value_error(concat("mix is read, write or mixed: ", wanted).c_str());
}

template <Result<IoRate> (IoBench::*kRun)(const IoRateOptions&)>
IoRate run(IoBench& self,
           const std::string& mix,
           uint64_t block_bytes,
           uint32_t depth,
           double seconds,
           double write_share,
           bool gathered) {
  const IoRateOptions options{.mix = mix_named(mix),
                              .block_bytes = block_bytes,
                              .depth = depth,
                              .seconds = seconds,
                              .write_share = write_share,
                              .gathered = gathered};
  auto rate = [&] {
    const nb::gil_scoped_release released;
    return (self.*kRun)(options);
  }();
  return value_or_raise(std::move(rate));
}

}  // namespace

void bind_bench(nb::module_& module) {
  module.attr("EXTENTS_ARE_HASHED") = kExtentsAreHashed;
  nb::class_<AdamRate>(module, "AdamRate", "Seconds of passes over all elements.")
      .def_ro("bytes_per_element", &AdamRate::bytes_per_element, "Read and written together.")
      .def_ro("element_count", &AdamRate::element_count)
      .def_ro("update_seconds", &AdamRate::update_seconds)
      .def_ro("traffic_seconds",
              &AdamRate::traffic_seconds,
              "The same reads and writes without the arithmetic, in turn with the updates.");
  module.def(
      "measure_adam",
      [](uint8_t dtype,
         uint64_t element_count,
         uint32_t tensor_count,
         uint32_t thread_count,
         uint32_t round_count) {
        const AdamRateOptions options{.dtype = static_cast<DType>(dtype),
                                      .element_count = element_count,
                                      .tensor_count = tensor_count,
                                      .thread_count = thread_count,
                                      .round_count = round_count};
        auto rate = [&] {
          const nb::gil_scoped_release released;
          return measure_adam(options);
        }();
        return value_or_raise(std::move(rate));
      },
      nb::kw_only(),
      "dtype"_a,
      "element_count"_a,
      "tensor_count"_a = 1,
      "thread_count"_a = 1,
      "round_count"_a = 5,
      "The update in memory beside the limit of that memory; `dtype` as in a ShardSpec.");
  nb::class_<HashRate>(module, "HashRate", "Seconds of passes over all bytes.")
      .def_ro("bytes", &HashRate::bytes)
      .def_ro("hash_seconds", &HashRate::hash_seconds, "As the daemon computes checksums.")
      .def_ro("plain_seconds", &HashRate::plain_seconds, "Without wide instructions.")
      .def_ro("read_seconds", &HashRate::read_seconds, "Reading alone.");
  module.def(
      "measure_hash",
      [](uint64_t bytes, uint32_t round_count) {
        auto rate = [&] {
          const nb::gil_scoped_release released;
          return measure_hash({.bytes = bytes, .round_count = round_count});
        }();
        return value_or_raise(std::move(rate));
      },
      nb::kw_only(),
      "bytes"_a,
      "round_count"_a = 5,
      "Checksums of extents beside the limit of memory, one thread.");
  nb::class_<Quantiles>(module, "Quantiles", "Seconds.")
      .def_ro("p50", &Quantiles::p50)
      .def_ro("p99", &Quantiles::p99);
  nb::class_<LeaseRate>(module, "LeaseRate", "Seconds of leases, one record a round.")
      .def_ro("resident", &LeaseRate::resident, "Lease and release without a request.")
      .def_ro("atomics", &LeaseRate::atomics, "Two atomic operations in shared memory.")
      .def_ro("requested", &LeaseRate::requested, "The same lease by request.")
      .def_ro("handed", &LeaseRate::handed, "A word to a thread that waits for it, and back.");
  module.def(
      "measure_leases",
      [](ClientSession& session, uint32_t shard_id, uint32_t count, uint32_t round_count) {
        const LeaseRateOptions options{
            .shard_id = shard_id, .count = count, .round_count = round_count};
        auto rate = [&] {
          const nb::gil_scoped_release released;
          return measure_leases(session, options);
        }();
        return value_or_raise(std::move(rate));
      },
      "session"_a,
      nb::kw_only(),
      "shard_id"_a,
      "count"_a,
      "round_count"_a,
      "Leases of a resident shard, beside the least that each way could take.");
  nb::class_<IoRate>(module, "IoRate")
      .def_ro("read_bytes", &IoRate::read_bytes)
      .def_ro("written_bytes", &IoRate::written_bytes)
      .def_ro("seconds", &IoRate::seconds)
      .def_ro("cpu_seconds", &IoRate::cpu_seconds, "This process's.");
  nb::class_<IoBench>(module, "IoBench", "A file of random bytes, removed with this object.")
      .def(nb::new_([](const std::string& directory, uint64_t bytes) {
             auto bench = [&] {
               const nb::gil_scoped_release released;
               return IoBench::create(directory, bytes);
             }();
             return value_or_raise(std::move(bench));
           }),
           "directory"_a,
           nb::kw_only(),
           "bytes"_a)
      .def_prop_ro("path", &IoBench::path)
      .def_prop_ro("memory_path",
                   &IoBench::memory_path,
                   "The buffers of the last run, for another process to map; empty before.")
      .def("through_queue",
           &run<&IoBench::through_queue>,
           "mix"_a,
           nb::kw_only(),
           "block_bytes"_a,
           "depth"_a,
           "seconds"_a,
           "write_share"_a = 0.5,
           "gathered"_a = true,
           "As the daemon transfers; `mix`: read, write or mixed, of which `write_share` writes. "
           "`gathered`: buffers lie together in runs of 2 MiB where the kernel has them.")
      .def("raw",
           &run<&IoBench::raw>,
           "mix"_a,
           nb::kw_only(),
           "block_bytes"_a,
           "depth"_a,
           "seconds"_a,
           "write_share"_a = 0.5,
           "gathered"_a = true,
           "io_uring with registered buffers and file, and nothing else.");
}

}  // namespace memd
