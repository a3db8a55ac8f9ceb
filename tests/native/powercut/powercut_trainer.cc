// Trains on a volume file until somebody cuts the power, and looks at what is left.
//
//   powercut_trainer train DIRECTORY SEED
//     Opens or makes the volume, finds out which operation of the workload it holds, and goes on
//     from there. Lines on standard output: "started N" before and "acknowledged N" after each.
//     Runs until it is killed; ends with 3 where the device fails, as it does once power is cut.
//   powercut_trainer verify DIRECTORY SEED FIRST LAST
//     Ends with 0 where the volume holds exactly what one of the operations FIRST to LAST left, and
//     says which: "holds N". 1 and what differs otherwise.

#include <sys/eventfd.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/units.h"
#include "io/io_queue.h"
#include "powercut/runner.h"
#include "powercut/workload.h"
#include "store/space/commit.h"

namespace memd::powercut {
namespace {

constexpr uint64_t kVolumeBytes = 24_MiB;
// No cut comes after so many operations.
constexpr uint64_t kOperationsMax = 1'000'000;

[[noreturn]] void end(int status, const std::string& what) {
  std::fprintf(stderr, "powercut_trainer: %s\n", what.c_str());
  std::exit(status);
}

uint64_t number(std::string_view text) {
  uint64_t value = 0;
  const auto [rest, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc() || rest != text.data() + text.size()) {
    end(2, concat("not a number: ", text));
  }
  return value;
}

void say(const std::string& line) {
  const std::string text = line + "\n";
  if (::write(STDOUT_FILENO, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    end(2, "standard output is closed");
  }
}

/// A runner on a real volume and the queue that a daemon would choose.
struct Opened {
  OwnedFd wake{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::unique_ptr<IoQueue> io;
  std::unique_ptr<Runner> runner;
};

Opened open_volume(const std::string& directory) {
  VolumeSetOptions options;
  options.directories = {directory};
  options.bytes = kVolumeBytes;
  auto set = VolumeSet::open(options);
  if (!set.is_ok()) end(1, set.status().message());
  Opened out;
  auto queue = make_io_queue({.depth = 32, .wake_fd = out.wake.get()});
  if (!queue.is_ok()) end(2, queue.status().message());
  out.io = std::move(queue.value().queue);
  out.runner = std::make_unique<Runner>(*out.io, out.wake.get(), std::move(set).value());
  if (!out.runner->loaded().is_ok()) end(1, out.runner->loaded().message());
  return out;
}

/// Everything that the volume holds, remainders included.
SetState state_of(const std::string& directory) {
  VolumeSetOptions options;
  options.directories = {directory};
  options.bytes = kVolumeBytes;
  auto set = VolumeSet::open(options);
  if (!set.is_ok()) end(1, set.status().message());
  const OwnedFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  auto queue = make_io_queue({.depth = 32, .wake_fd = wake.get()});
  if (!queue.is_ok()) end(2, queue.status().message());
  Recovered found = recover(*queue.value().queue, std::move(set).value());
  if (!found.status.is_ok()) end(1, found.status.message());
  return std::move(found.state);
}

/// Brings `workload` to what `found` is, from operation `first` to `last`.
bool find(Workload& workload, const SetState& found, uint64_t first, uint64_t last) {
  const uint64_t wanted = digest(found);
  while (workload.operation_count() < first) workload.skip();
  while (digest(workload.expected()) != wanted) {
    if (workload.operation_count() >= last) return false;
    workload.skip();
  }
  return true;
}

int train(const std::string& directory, uint64_t seed) {
  // Half of the seeds, so that both ways to train are cut.
  Workload workload(seed, {.early = seed % 2 == 0});
  {
    // Formats it where it is new.
    Opened opened = open_volume(directory);
  }
  if (!find(workload, state_of(directory), 0, kOperationsMax)) {
    end(1, "the volume does not hold any operation of this seed");
  }
  Opened opened = open_volume(directory);
  say(concat("holds ", workload.operation_count()));
  while (workload.operation_count() < kOperationsMax) {
    say(concat("started ", workload.operation_count() + 1));
    if (Status status = workload.run(*opened.runner); !status.is_ok()) {
      std::fprintf(stderr, "powercut_trainer: %s\n", status.message().c_str());
      // What failed is on disk or not; nothing is to be tidied up.
      ::_exit(3);
    }
    say(concat("acknowledged ", workload.operation_count()));
  }
  end(2, "nobody cut the power");
}

int verify(const std::string& directory, uint64_t seed, uint64_t first, uint64_t last) {
  const SetState found = state_of(directory);
  Workload workload(seed);
  if (find(workload, found, first, last)) {
    say(concat("holds ", workload.operation_count()));
    return 0;
  }
  for (const uint64_t operation : {first, last}) {
    Workload other(seed);
    while (other.operation_count() < operation) other.skip();
    std::fprintf(stderr,
                 "powercut_trainer: against operation %llu: %s\n",
                 static_cast<unsigned long long>(operation),
                 difference(other.expected(), found).c_str());
  }
  return 1;
}

int main(int count, char** texts) {
  const std::string_view command = count > 1 ? texts[1] : "";
  if (command == "train" && count == 4) return train(texts[2], number(texts[3]));
  if (command == "verify" && count == 6) {
    return verify(texts[2], number(texts[3]), number(texts[4]), number(texts[5]));
  }
  end(2, "usage: train DIRECTORY SEED | verify DIRECTORY SEED FIRST LAST");
}

}  // namespace
}  // namespace memd::powercut

int main(int count, char** texts) { return memd::powercut::main(count, texts); }
