// Many power cuts and damaged images, seed after seed.
//
//   powercut_soak [--states N] [--images N] [--early 1] [--restarts 1] [--loads 1]
//                 [--seed FIRST] [--json PATH]
//
// `--early 1`: of trainings whose updates begin before their steps are closed. `--restarts 1`: the
// daemon is killed now and then, and started again while the drives' caches stay. `--loads 1`:
// checkpoints are loaded between steps, and some of these loads break off.
//
// Ends with 1 where there was a violation. The same seeds give the same states: who was interrupted
// goes on with the seed that was shown last, and for the states that are left.

#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/failpoint.h"
#include "powercut/corruption.h"
#include "powercut/explorer.h"
#include "powercut/recording.h"

namespace memd::powercut {
namespace {

// Few enough that new seeds, with other sizes and another order of operations, come often.
constexpr uint64_t kStatesPerSeed = 20'000;
constexpr uint64_t kImagesPerSeed = 5'000;
constexpr uint64_t kOperations = 20;
constexpr uint64_t kReadAllEvery = 250;

struct Arguments {
  uint64_t states = 0;
  uint64_t images = 0;
  uint64_t seed = 1;
  RecordOptions record;
  std::string json;
};

[[noreturn]] void usage(const std::string& what) {
  std::fprintf(
      stderr,
      "powercut_soak: %s\nusage: powercut_soak [--states N] [--images N] [--early 1] "
      "[--restarts 1] [--loads 1] [--seed FIRST] [--json PATH], with at least one of --states and "
      "--images\n",
      what.c_str());
  std::exit(2);
}

uint64_t number(std::string_view name, std::string_view text) {
  uint64_t value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc() || end != text.data() + text.size()) {
    usage(concat(name, " wants a number: ", text));
  }
  return value;
}

Arguments parse(int count, char** texts) {
  Arguments out;
  for (int i = 1; i < count; i += 2) {
    const std::string_view name = texts[i];
    if (i + 1 == count) usage(concat(name, " wants a value"));
    const std::string_view value = texts[i + 1];
    if (name == "--states") {
      out.states = number(name, value);
    } else if (name == "--images") {
      out.images = number(name, value);
    } else if (name == "--seed") {
      out.seed = number(name, value);
    } else if (name == "--early") {
      out.record.early = number(name, value) != 0;
    } else if (name == "--restarts") {
      out.record.restarts = number(name, value) != 0;
    } else if (name == "--loads") {
      out.record.loads = number(name, value) != 0;
    } else if (name == "--json") {
      out.json = value;
    } else {
      usage(concat("there is no option ", name));
    }
  }
  if (out.states == 0 && out.images == 0) usage("nothing to do");
  return out;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '\n') {
      out += "\\n";
    } else {
      if (c == '"' || c == '\\') out += '\\';
      out += c;
    }
  }
  return out + "\"";
}

/// What one kind of test has come to.
struct Sum {
  uint64_t wanted = 0;
  uint64_t done = 0;
  uint64_t seed_next = 0;
  uint64_t violation_count = 0;
  std::vector<std::pair<const char*, uint64_t>> parts;
  std::vector<std::string> violations;
  double seconds = 0;

  void add(const char* name, uint64_t count) {
    for (auto& [known, sum] : parts) {
      if (std::strcmp(known, name) == 0) {
        sum += count;
        return;
      }
    }
    parts.emplace_back(name, count);
  }
  void add_violations(uint64_t count, const std::vector<std::string>& texts) {
    violation_count += count;
    for (const std::string& text : texts) {
      std::fprintf(stderr, "\nviolation: %s\n", text.c_str());
      if (violations.size() < 10) violations.push_back(text);
    }
  }
  std::string json() const {
    std::string out = concat("{\"done\": ",
                             done,
                             ", \"violations\": ",
                             violation_count,
                             ", \"seed_next\": ",
                             seed_next,
                             ", \"seconds\": ",
                             seconds);
    for (const auto& [name, sum] : parts) out += concat(", \"", name, "\": ", sum);
    out += ", \"texts\": [";
    for (size_t i = 0; i < violations.size(); ++i) {
      out += (i == 0 ? "" : ", ") + quoted(violations[i]);
    }
    return out + "]}";
  }
};

void show(const char* what, const Sum& sum, uint64_t more) {
  static const bool terminal = isatty(STDERR_FILENO) != 0;
  if (!terminal) return;
  std::fprintf(stderr,
               "\r%s: seed %llu, %llu of %llu, %llu violations ",
               what,
               static_cast<unsigned long long>(sum.seed_next),
               static_cast<unsigned long long>(sum.done + more),
               static_cast<unsigned long long>(sum.wanted),
               static_cast<unsigned long long>(sum.violation_count));
}

/// Until `sum.done` is what was wanted; `one_seed` does at most `count` of them.
template <typename OneSeed>
void repeat(const char* what,
            Sum& sum,
            uint64_t per_seed,
            const RecordOptions& options,
            const OneSeed& one_seed) {
  const auto started = std::chrono::steady_clock::now();
  while (sum.done < sum.wanted) {
    const Recording recording = record(sum.seed_next, kOperations, options);
    if (!recording.fault.empty()) {
      sum.add_violations(1, {concat("seed ", sum.seed_next, ": ", recording.fault)});
      break;
    }
    const uint64_t done = one_seed(recording, std::min(per_seed, sum.wanted - sum.done));
    if (done == 0) {
      sum.add_violations(1, {concat("seed ", sum.seed_next, " gave nothing to test")});
      break;
    }
    sum.done += done;
    ++sum.seed_next;
    show(what, sum, 0);
  }
  sum.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  if (sum.wanted > 0 && isatty(STDERR_FILENO) != 0) std::fputc('\n', stderr);
}

int soak(const Arguments& arguments) {
  Sum states;
  states.wanted = arguments.states;
  states.seed_next = arguments.seed;
  repeat("power cuts",
         states,
         kStatesPerSeed,
         arguments.record,
         [&](const Recording& recording, uint64_t count) {
           const ExploreResult result =
               explore(recording,
                       {.state_count = count,
                        .exhaustive_operations = 3,
                        .read_all_every = kReadAllEvery,
                        .seed = arguments.seed,
                        .progress = [&](uint64_t done) { show("power cuts", states, done); }});
           states.add("early_adopted", recording.early_adopted);
           states.add("early_discarded", recording.early_discarded);
           states.add("restarts", recording.restart_count);
           states.add("found_unacknowledged", recording.found_after_count);
           states.add("exhaustive", result.exhaustive_count);
           states.add("torn", result.torn_count);
           states.add("found_before", result.before_count);
           states.add("found_after", result.after_count);
           states.add("read_through_leases", result.read_all_count);
           states.add_violations(result.violation_count, result.violations);
           return result.state_count;
         });
  Sum images;
  images.wanted = arguments.images;
  images.seed_next = arguments.seed;
  repeat("images",
         images,
         kImagesPerSeed,
         arguments.record,
         [&](const Recording& recording, uint64_t count) {
           const CorruptResult result =
               corrupt(recording,
                       {.count = count,
                        .seed = arguments.seed,
                        .read_all_every = kReadAllEvery,
                        .progress = [&](uint64_t done) { show("images", images, done); }});
           images.add("whole", result.whole_count);
           images.add("lost_shards", result.lost_count);
           images.add("refused", result.refused_count);
           images.add("previous_commit", result.previous_count);
           images.add("read_through_leases", result.read_all_count);
           images.add_violations(result.violation_count, result.violations);
           return result.count;
         });
  const std::string text = concat("{\"seed_first\": ",
                                  arguments.seed,
                                  ", \"power_cuts\": ",
                                  states.json(),
                                  ", \"images\": ",
                                  images.json(),
                                  "}\n");
  std::fputs(text.c_str(), stdout);
  if (!arguments.json.empty()) {
    std::ofstream file(arguments.json);
    file << text;
    file.close();
    if (!file) usage("cannot write " + arguments.json);
  }
  return states.violation_count + images.violation_count == 0 ? 0 : 1;
}

}  // namespace
}  // namespace memd::powercut

int main(int count, char** texts) {
#ifdef MEMD_FAULTS
  const char* const planted = std::getenv("MEMD_PLANT");
  memd::failpoint::plant(planted == nullptr ? "" : planted);
#endif
  return memd::powercut::soak(memd::powercut::parse(count, texts));
}
