#include "bench/lease_rate.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/threads.h"
#include "ring/shared_memory.h"

namespace memd {
namespace {

// As a lease of the client waits: it is never that long.
constexpr uint64_t kTimeoutNs = 10'000'000'000;

Quantiles quantiles(std::vector<uint64_t>& times_ns) {
  const auto at = [&](size_t index) {
    std::nth_element(
        times_ns.begin(), times_ns.begin() + static_cast<ptrdiff_t>(index), times_ns.end());
    return static_cast<double>(times_ns[index]) * 1e-9;
  };
  return {.p50 = at(times_ns.size() / 2), .p99 = at(times_ns.size() * 99 / 100)};
}

/// `run` says whether it went well.
template <typename Run>
std::optional<Quantiles> time(uint32_t count, const Run& run) {
  const SteadyClock clock;
  std::vector<uint64_t> times_ns(count);
  for (uint64_t& each : times_ns) {
    const uint64_t start_ns = clock.now_ns();
    if (!run()) return std::nullopt;
    each = clock.now_ns() - start_ns;
  }
  return quantiles(times_ns);
}

/// Another thread that answers each word at once, as a daemon that need not sleep.
class Answerer {
 public:
  static Result<std::unique_ptr<Answerer>> create() {
    auto answerer = std::unique_ptr<Answerer>(new Answerer());
    auto thread = start_thread([raw = answerer.get()] { raw->answer(); });
    if (!thread.is_ok()) return thread.status();
    answerer->thread_ = std::move(thread).value();
    return answerer;
  }
  ~Answerer() {
    asked_.store(kEnd, std::memory_order_release);
    if (thread_.joinable()) thread_.join();
  }
  Answerer(const Answerer&) = delete;
  Answerer& operator=(const Answerer&) = delete;

  void ask() {
    const uint64_t word = asked_.load(std::memory_order_relaxed) + 1;
    asked_.store(word, std::memory_order_release);
    while (answered_.load(std::memory_order_acquire) != word) {
    }
  }

 private:
  static constexpr uint64_t kEnd = ~uint64_t{0};

  Answerer() = default;
  void answer() {
    for (uint64_t seen = 0;;) {
      const uint64_t word = asked_.load(std::memory_order_acquire);
      if (word == seen) continue;
      if (word == kEnd) return;
      seen = word;
      answered_.store(seen, std::memory_order_release);
    }
  }

  alignas(64) std::atomic<uint64_t> asked_{0};
  alignas(64) std::atomic<uint64_t> answered_{0};
  std::thread thread_;
};

}  // namespace

Result<LeaseRate> measure_leases(ClientSession& session, const LeaseRateOptions& options) {
  if (options.count == 0 || options.round_count == 0) {
    return error(StatusCode::invalid_argument, "leases and rounds are counted from 1");
  }
  auto page = SharedMemory::create("memd-bench", sizeof(std::atomic<uint32_t>));
  if (!page.is_ok()) return page.status();
  auto& counter = *reinterpret_cast<std::atomic<uint32_t>*>(page.value().data());
  LeaseRate rate;
  for (uint32_t round = 0; round < options.round_count; ++round) {
    const auto resident = time(options.count, [&] {
      const auto lease = session.lease_resident(options.shard_id);
      if (lease) session.release(*lease);
      return lease.has_value();
    });
    if (!resident) {
      return error(StatusCode::not_found,
                   "the shard is not resident, or somebody writes it: ",
                   options.shard_id);
    }
    const auto atomics = time(options.count, [&] {
      counter.fetch_add(1, std::memory_order_seq_cst);
      counter.fetch_sub(1, std::memory_order_seq_cst);
      return true;
    });
    Status refused;
    const auto requested = time(options.count, [&] {
      const auto lease =
          session.lease_by_request(options.shard_id, Part::value, LeaseMode::read, kTimeoutNs);
      if (lease.is_ok()) {
        session.release(lease.value());
      } else {
        refused = lease.status();
      }
      return lease.is_ok();
    });
    if (!requested) return refused;
    auto answerer = Answerer::create();
    if (!answerer.is_ok()) return answerer.status();
    const auto handed = time(options.count, [&] {
      answerer.value()->ask();
      return true;
    });
    rate.resident.push_back(*resident);
    rate.atomics.push_back(*atomics);
    rate.requested.push_back(*requested);
    rate.handed.push_back(*handed);
  }
  return rate;
}

}  // namespace memd
