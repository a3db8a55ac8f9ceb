#include "machine.h"

#include <ATen/Parallel.h>

namespace sim {

Machine& machine() {
  static auto* machine = new Machine;  // outlives the tensors of the interpreter's last moments
  return *machine;
}

void Machine::seed(int64_t value) {
  auto locked = lock();
  finish_all();
  dice_.seed(static_cast<uint64_t>(value));
  pace_.clear();
  // Nothing is left that a thread could race with. Ticks go on: events of before may be waited for.
  accesses_.clear();
  known_.fill({});
  published_.clear();
  ++seed_count_;
  given_.fill(0);
  is_helpful_ = roll() < 0.3;
}

// The calling thread. It has forgotten what it knew of work under other dice.
HostThread& Machine::host() {
  auto& caller = this_host_thread();
  if (std::exchange(caller.seed_count, seed_count_) != seed_count_) caller.clock = {};
  return caller;
}

void Machine::check_races(bool is_on) {
  auto locked = lock();
  accesses_.check_races(is_on);
}

Actor Machine::next_stream(int device) {
  auto locked = lock();
  return stream_of(device, 1 + given_.at(device)++ % (kStreams - 1));
}

void Machine::queue(Actor stream, Work work) {
  auto locked = lock();
  follow_host(stream);
  auto tick = ++ticks_[stream];
  known_[stream].note(stream, tick);
  for (const auto& span : work.spans)
    if (span.begin != span.end)
      accesses_.note(region_of(span.begin), {span, stream, tick, work.name}, known_[stream]);
  clock_.run(stream, work.name, work.cost);
  queues_[stream].push_back({std::move(work.run), nullptr, nullptr, tick});
  if (work.may_run_now) drift();
}

MarkPtr Machine::mark(Actor stream) {
  auto locked = lock();
  follow_host(stream);
  auto mark = std::make_shared<Mark>(Mark{stream, known_[stream], clock_.time_of(stream)});
  queues_[stream].push_back({nullptr, nullptr, mark});
  return mark;
}

void Machine::block(Actor stream, const MarkPtr& awaited) {
  auto locked = lock();
  follow_host(stream);
  known_[stream].join(awaited->before);
  clock_.hold(stream, awaited->time);
  queues_[stream].push_back({nullptr, awaited, nullptr});
}

void Machine::wait(const MarkPtr& mark) {
  auto locked = lock();
  reach(mark);
  learn(mark);
}

bool Machine::query(const MarkPtr& mark) {
  auto locked = lock();
  if (clock_.is_recording()) {
    if (host().time < mark->time) return false;
    reach(mark);
  }
  if (!mark->has_passed && roll() < 0.3) advance(mark->stream);
  if (mark->has_passed) learn(mark);
  return mark->has_passed;
}

void Machine::finish_device(int device) {
  auto locked = lock();
  for (int64_t id = 0; id < kStreams; ++id) finish(stream_of(device, id));
}

void Machine::finish_all() {
  for (int device = 0; device < kDevices; ++device) finish_device(device);
}

void Machine::reach(const MarkPtr& mark) {
  auto locked = lock();
  while (!mark->has_passed) advance(is_helpful_ && roll() < 0.5 ? any_busy() : mark->stream);
}

void Machine::host_touches(const Span& span) {
  auto locked = lock();
  auto& toucher = host();
  auto tick = ++toucher.tick;
  toucher.clock.note(toucher.actor, tick);
  accesses_.note(region_of(span.begin), {span, toucher.actor, tick, "the host"}, toucher.clock);
}

void Machine::publish(int64_t key) {
  auto locked = lock();
  published_[key].clock.join(host().clock);
}

void Machine::publish_time(int64_t key) {
  auto locked = lock();
  auto& published = published_[key];
  published.time = std::max(published.time, host().time);
}

void Machine::observe(int64_t key) {
  auto locked = lock();
  auto found = published_.find(key);
  if (found == published_.end()) return;
  auto& observer = host();
  observer.clock.join(found->second.clock);
  observer.time = clock_.wait(observer.actor, observer.time, found->second.time);
}

bool Machine::is_quiet(const char* begin, const char* end) {
  auto locked = lock();
  return accesses_.all_over(region_of(begin), [&](const Access& access) {
    auto is_elsewhere = access.span.end <= begin || end <= access.span.begin;
    return is_elsewhere || access.actor < 0 || done_[access.actor] >= access.tick;
  });
}

void Machine::forget(const char* begin, const char* end) {
  auto locked = lock();
  accesses_.forget(begin, end, [](const Access&) { return true; });
}

void Machine::forget_before(const std::vector<MarkPtr>& marks, const char* begin, const char* end) {
  auto locked = lock();
  accesses_.forget(begin, end, [&](const Access& access) {
    return std::any_of(marks.begin(), marks.end(), [&](const MarkPtr& mark) {
      return mark->before.knows(access.actor, access.tick);
    });
  });
}

// Work that is queued next comes after all work that the calling thread knows to be over.
void Machine::follow_host(Actor stream) {
  const auto& caller = host();
  known_[stream].join(caller.clock);
  clock_.hold(stream, caller.time);
}

void Machine::learn(const MarkPtr& mark) {
  auto& waiter = host();
  waiter.clock.join(mark->before);
  waiter.time = clock_.wait(waiter.actor, waiter.time, mark->time);
}

std::vector<Actor> Machine::busy() const {
  std::vector<Actor> streams;
  for (Actor stream = 0; stream < kStreamsTogether; ++stream)
    if (!queues_[stream].empty()) streams.push_back(stream);
  return streams;
}

Actor Machine::any_busy() {
  auto streams = busy();
  return streams[dice_() % streams.size()];
}

// Runs the next task of `stream`, or one of those that it waits for.
void Machine::advance(Actor stream) {
  auto is_held = [](const Task& task) { return task.awaited && !task.awaited->has_passed; };
  while (is_held(queues_[stream].front())) stream = queues_[stream].front().awaited->stream;
  auto task = std::move(queues_[stream].front());
  queues_[stream].pop_front();
  if (task.passes) task.passes->has_passed = true;
  if (task.tick) done_[stream] = task.tick;
  // oneDNN asks OpenMP, which has a number of threads for each thread that runs tasks.
  at::internal::lazy_init_num_threads();
  if (task.run) task.run();
}

void Machine::drift() {
  while (!busy().empty()) {
    auto chosen = any_busy();
    if (!pace_.count(chosen)) pace_[chosen] = std::array{0.0, 0.0, 0.5, 1.0}[dice_() % 4];
    if (roll() >= pace_[chosen]) break;
    advance(chosen);
  }
}

}  // namespace sim
