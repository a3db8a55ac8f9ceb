#include "device_pool.h"

#include <sys/mman.h>

#include <cstring>

#include "current_stream.h"

namespace sim {
namespace {

constexpr size_t kGranuleBytes = 512;  // views on a device begin on such boundaries
// Smaller requests share segments.
constexpr size_t kSharedBelowBytes = 5 * kGranuleBytes;
constexpr size_t kSharedSegmentBytes = 10 * kGranuleBytes;

bool is_small_request(size_t size) { return size <= kGranuleBytes; }

char* reserve(size_t size, int protection) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  auto* address = mmap(nullptr, size, protection, kFlags, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "no address space for the simulated device");
  return static_cast<char*>(address);
}

/// Those that lie in the range as a whole: others have bytes of a neighbour.
void give_up_pages(char* begin, char* end) {
  constexpr uintptr_t kPageBytes = 4096;
  auto first = (reinterpret_cast<uintptr_t>(begin) + kPageBytes - 1) / kPageBytes * kPageBytes;
  auto last = reinterpret_cast<uintptr_t>(end) / kPageBytes * kPageBytes;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace

DevicePool::DevicePool(int device)
    : device_(device),
      wall_(reserve(kReserved, PROT_NONE)),
      bytes_(reserve(kReserved, PROT_READ | PROT_WRITE)),
      next_(wall_) {}

Block* DevicePool::allocate(size_t size) {
  size = (size + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
  auto stream = current_stream(device_);
  reclaim(false);
  auto* block = find_free(stream, size);
  if (!block) block = add_segment(stream, size);
  if (!block) {
    ++retried_count_;
    empty_cache();
    block = add_segment(stream, size);
  }
  if (!block) ++refused_count_;
  TORCH_CHECK_WITH(OutOfMemoryError,
                   block,
                   "simulated device: out of memory: ",
                   size,
                   " bytes wanted, ",
                   allocated_.current,
                   " in use and ",
                   reserved_.current,
                   " reserved of ",
                   limit_);
  split(block, size);
  block->is_free = false;
  allocated_.increase(size);
  active_.increase(size);
  auto* bytes = bytes_of(block->address);
  // NaN at once where no task uses the memory any more: bytes of its last use, often the right
  // ones, would hide that a copy was not waited for. A task of the stream that uses it still comes
  // first.
  if (machine().is_quiet(bytes, bytes + size)) std::memset(bytes, 0xff, size);
  try {
    machine().queue(stream,
                    {.name = "allocation",
                     .cost = {},
                     .spans = {{bytes, bytes + size, true}},
                     .run = [bytes, size] { std::memset(bytes, 0xff, size); },
                     .may_run_now = false});
  } catch (...) {
    allocated_.decrease(size);
    retire(block);
    throw;
  }
  return block;
}

Block* DevicePool::find_free(Actor stream, size_t size) {
  bool is_small = is_small_request(size);
  auto found = free_.lower_bound(ByPoolAndSize::Key{is_small, stream, size, nullptr});
  if (found == free_.end() || (*found)->is_small != is_small || (*found)->stream != stream)
    return nullptr;
  auto* block = *found;
  free_.erase(found);
  return block;
}

Block* DevicePool::add_segment(Actor stream, size_t size) {
  bool is_small = is_small_request(size);
  if (size < kSharedBelowBytes) size = kSharedSegmentBytes;
  if (reserved_.current + static_cast<int64_t>(size) > limit_) return nullptr;
  TORCH_CHECK(next_ + size <= wall_ + kReserved, "simulated device: out of address space");
  auto* address = std::exchange(next_, next_ + size);
  segments_.emplace(address, size);
  reserved_.increase(size);
  segment_count_.increase(1);
  return blocks_.emplace(address, new Block{address, size, stream, is_small}).first->second;
}

void DevicePool::split(Block* block, size_t size) {
  if (block->size == size) return;
  auto* rest = new Block{block->address + size, block->size - size, block->stream, block->is_small};
  block->size = size;
  blocks_.emplace(rest->address, rest);
  free_.insert(rest);
}

void DevicePool::free(Block* block) {
  allocated_.decrease(block->size);
  for (auto stream : block->users) block->leaves.push_back(machine().mark(stream));
  if (block->leaves.empty())
    retire(block);
  else
    leaving_.push_back(block);
}

// Takes back blocks whose users have passed; `is_waiting`: all of them.
void DevicePool::reclaim(bool is_waiting) {
  auto has_left = [&](Block* block) {
    bool is_over = true;
    for (auto& mark : block->leaves) {
      if (is_waiting) machine().reach(mark);
      is_over = is_over && mark->has_passed;
    }
    return is_over;
  };
  std::vector<Block*> staying;
  for (auto* block : std::exchange(leaving_, {})) {
    if (!has_left(block)) {
      staying.push_back(block);
      continue;
    }
    auto* bytes = bytes_of(block->address);
    machine().forget_before(block->leaves, bytes, bytes + block->size);
    retire(block);
  }
  leaving_.insert(leaving_.end(), staying.begin(), staying.end());
}

void DevicePool::retire(Block* block) {
  active_.decrease(block->size);
  block->is_free = true;
  block->users.clear();
  block->leaves.clear();
  auto at = blocks_.find(block->address);
  auto behind = std::next(at);
  if (behind != blocks_.end() && !segments_.count(behind->first) && behind->second->is_free)
    merge(block, behind->second);
  if (!segments_.count(block->address) && std::prev(at)->second->is_free) {
    auto* before = std::prev(at)->second;
    free_.erase(before);
    merge(before, block);
    block = before;
  }
  free_.insert(block);
}

// `block` is not in `free_`; both are of one segment and one stream.
void DevicePool::merge(Block* block, Block* behind) {
  free_.erase(behind);
  blocks_.erase(behind->address);
  block->size += behind->size;
  delete behind;
}

bool DevicePool::is_segment(const Block* block) const {
  auto found = segments_.find(block->address);
  return found != segments_.end() && found->second == block->size;
}

void DevicePool::empty_cache() {
  reclaim(true);
  std::vector<Block*> whole;
  for (auto* block : free_)
    if (is_segment(block)) whole.push_back(block);
  if (whole.empty()) return;
  for (int64_t id = 0; id < kStreams; ++id) machine().reach(machine().mark(stream_of(device_, id)));
  for (auto* block : whole) release(block);
}

void DevicePool::begin_anew() {
  empty_cache();
  for (auto* block : std::exchange(free_, {})) block->is_free = false;
}

void DevicePool::release(Block* segment) {
  auto* bytes = bytes_of(segment->address);
  machine().forget(bytes, bytes + segment->size);
  give_up_pages(bytes, bytes + segment->size);
  reserved_.decrease(segment->size);
  segment_count_.decrease(1);
  ++freed_count_;
  free_.erase(segment);
  segments_.erase(segment->address);
  blocks_.erase(segment->address);
  delete segment;
}

const char* DevicePool::segment_of(const char* bytes) const {
  auto* address = wall_ + (bytes - bytes_);
  auto found = segments_.upper_bound(address);
  bool is_there = found != segments_.begin();
  if (is_there) --found;
  TORCH_CHECK(is_there && address < found->first + found->second,
              "simulated device: illegal memory access: the driver has this memory back");
  return bytes_of(found->first);
}

c10::CachingDeviceAllocator::DeviceStats DevicePool::statistics() const {
  c10::CachingDeviceAllocator::DeviceStats stats;
  stats.allocated_bytes[0] = allocated_;
  stats.active_bytes[0] = active_;
  stats.reserved_bytes[0] = reserved_;
  stats.segment[0] = segment_count_;
  stats.num_alloc_retries = retried_count_;
  stats.num_ooms = refused_count_;
  stats.num_device_free = freed_count_;
  return stats;
}

void DevicePool::reset_accumulated() {
  for (auto* stat : {&allocated_, &active_, &reserved_, &segment_count_}) stat->reset_accumulated();
  retried_count_ = refused_count_ = freed_count_ = 0;
}

void DevicePool::reset_peak() {
  for (auto* stat : {&allocated_, &active_, &reserved_, &segment_count_}) stat->reset_peak();
}

}  // namespace sim
