// Memory of the pretend devices and pinned host memory.
//
// An allocation remembers which streams used which of its bytes. The stream sanitizer reads this: two kernels that use
// the same bytes (one of them writing) on different streams need an event between them, and memory may only be freed when
// the stream that allocated it is ordered after every other use, or `record_stream` has named the other stream.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <cstring>
#include <set>

#include "timeline.h"

namespace pretend {

struct Allocation {
  void* bytes = nullptr;
  size_t size = 0;
  int device = 0;
  size_t slot = 0; // of the stream that allocated it
  std::vector<Use> uses;
  std::set<size_t> recorded; // streams named by record_stream
  c10::Storage owner; // memory that a CPU kernel allocated for its result
};

struct Access {
  Allocation* allocation;
  size_t begin, end; // bytes
  bool write;
};

inline void report(const std::string& error, bool can_raise) {
  auto& w = world();
  w.errors.push_back(error);
  if (w.sanitizer != Sanitizer::raise) return;
  if (!can_raise) w.unraised.push_back(error);
  else TORCH_CHECK(false, error);
}

inline void raise_unraised() {
  auto& w = world();
  if (w.unraised.empty()) return;
  auto error = w.unraised.front();
  w.unraised.clear();
  TORCH_CHECK(false, error);
}

inline std::string described(const Use& use) {
  return (use.write ? "write by " : "read by ") + use.op + " on " + world().streams[use.slot]->name() +
      (use.stack.empty() ? "" : " at " + use.stack);
}

inline void check_use(const StreamState& stream, const Allocation& allocation, const Use& use) {
  for (auto& before : allocation.uses) {
    if (before.slot == use.slot || before.end <= use.begin || use.end <= before.begin) continue;
    if (!(before.write || use.write) || seen(stream.clock, before.slot) >= before.count) continue;
    report("stream sanitizer: the " + described(use) + " is not ordered after the " + described(before) +
               "; let the stream wait for an event that is recorded after the earlier one",
           true);
    return;
  }
}

inline void remember_use(const StreamState& stream, Allocation& allocation, Use use) {
  auto is_covered = [&](const Use& before) {
    bool inside = use.begin <= before.begin && before.end <= use.end;
    if (!inside) return false;
    if (use.write) return before.slot == use.slot || seen(stream.clock, before.slot) >= before.count;
    return before.slot == use.slot && !before.write;
  };
  auto& uses = allocation.uses;
  uses.erase(std::remove_if(uses.begin(), uses.end(), is_covered), uses.end());
  uses.push_back(std::move(use));
}

inline void check_free(const Allocation& allocation) {
  auto& w = world();
  if (w.sanitizer == Sanitizer::off) return;
  auto& allocator = *w.streams[allocation.slot];
  for (auto& use : allocation.uses) {
    if (use.slot == allocation.slot || allocation.recorded.count(use.slot)) continue;
    if (seen(allocator.clock, use.slot) >= use.count || seen(w.host, use.slot) >= use.count) continue;
    report("stream sanitizer: memory of " + allocator.name() + " is freed after the " + described(use) +
               ", which may still run; call record_stream for that stream, or let the first stream wait for an event",
           false);
    return;
  }
}

// ---- device memory

struct DeviceAllocator final : c10::DeviceAllocator {
  std::vector<c10::CachingDeviceAllocator::DeviceStats> stats{64};

  static size_t rounded(size_t size) {
    return (size + 511) / 512 * 512;
  }

  void add(c10::CachingDeviceAllocator::DeviceStats& stats, size_t size) {
    auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocation[all].increase(1);
    stats.active[all].increase(1);
    stats.requested_bytes[all].increase(size);
    stats.allocated_bytes[all].increase(rounded(size));
    stats.active_bytes[all].increase(rounded(size));
    auto missing = stats.allocated_bytes[all].current - stats.reserved_bytes[all].current;
    if (missing > 0) stats.reserved_bytes[all].increase(missing);
  }

  void remove(c10::CachingDeviceAllocator::DeviceStats& stats, size_t size) {
    auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocation[all].decrease(1);
    stats.active[all].decrease(1);
    stats.requested_bytes[all].decrease(size);
    stats.allocated_bytes[all].decrease(rounded(size));
    stats.active_bytes[all].decrease(rounded(size));
  }

  c10::DataPtr track(std::unique_ptr<Allocation> allocation, int device) {
    allocation->device = device;
    auto stream = current_stream(device);
    {
      Lock lock(world().mutex);
      allocation->slot = world().stream(stream).slot;
      add(stats[device], allocation->size);
    }
    auto* bytes = allocation->bytes;
    return {bytes, allocation.release(), &release, device_of_index(device)};
  }

  c10::DataPtr allocate_on(size_t size, int device) {
    auto allocation = std::make_unique<Allocation>();
    allocation->size = size;
    if (size) allocation->bytes = std::aligned_alloc(64, (size + 63) / 64 * 64);
    return track(std::move(allocation), device);
  }

  // The result of a CPU kernel becomes device memory without a copy.
  c10::DataPtr adopt(const c10::Storage& storage, int device) {
    auto allocation = std::make_unique<Allocation>();
    allocation->size = storage.nbytes();
    allocation->bytes = const_cast<void*>(storage.data());
    allocation->owner = storage;
    return track(std::move(allocation), device);
  }

  static void release(void* context);

  c10::DataPtr allocate(size_t size) override {
    return allocate_on(size, current_device);
  }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    std::memcpy(target, source, size);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    Lock lock(world().mutex);
    for (auto& device : stats)
      device.reserved_bytes[all].decrease(device.reserved_bytes[all].current - device.allocated_bytes[all].current);
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(world().mutex);
    return stats.at(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock(world().mutex);
    for (auto* stat : all_stats(device)) stat->reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(world().mutex);
    for (auto* stat : all_stats(device)) stat->reset_peak();
  }
  std::vector<c10::CachingAllocator::Stat*> all_stats(c10::DeviceIndex device) {
    auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    auto& s = stats.at(device);
    return {&s.allocation[all],      &s.active[all],         &s.requested_bytes[all],
            &s.allocated_bytes[all], &s.active_bytes[all],   &s.reserved_bytes[all]};
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    size_t total = size_t(16) << 30;
    Lock lock(world().mutex);
    return {total - stats.at(device).reserved_bytes[all].current, total};
  }
};

inline DeviceAllocator& device_allocator() {
  static auto* allocator = new DeviceAllocator();
  return *allocator;
}

inline void DeviceAllocator::release(void* context) {
  std::unique_ptr<Allocation> allocation(static_cast<Allocation*>(context));
  {
    Lock lock(world().mutex);
    check_free(*allocation);
    device_allocator().remove(device_allocator().stats[allocation->device], allocation->size);
  }
  if (!allocation->owner) std::free(allocation->bytes);
}

inline Allocation* allocation_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &DeviceAllocator::release ? static_cast<Allocation*>(pointer.get_context()) : nullptr;
}

inline void DeviceAllocator::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  auto* allocation = allocation_of(pointer);
  if (!allocation) return;
  Lock lock(world().mutex);
  allocation->recorded.insert(world().stream(stream).slot);
}

// ---- pinned memory

struct PinnedAllocator final : at::HostAllocator {
  std::mutex mutex;
  std::map<const char*, size_t> blocks;

  static PinnedAllocator& instance();

  c10::DataPtr allocate(size_t size) override {
    void* bytes = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    Lock lock(mutex);
    if (size) blocks[static_cast<char*>(bytes)] = size;
    return {bytes, bytes, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* bytes) {
    {
      Lock lock(instance().mutex);
      instance().blocks.erase(static_cast<char*>(bytes));
    }
    std::free(bytes);
  }
  bool holds(const void* pointer) {
    auto* address = static_cast<const char*>(pointer);
    Lock lock(mutex);
    auto next = blocks.upper_bound(address);
    if (next == blocks.begin()) return false;
    auto& [begin, size] = *std::prev(next);
    return address < begin + size;
  }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    std::memcpy(target, source, size);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

inline PinnedAllocator& PinnedAllocator::instance() {
  static auto* allocator = new PinnedAllocator();
  return *allocator;
}

// ---- launches

// Accounts for one kernel: it waits for the gates of its stream (unless it is only enqueued), is checked against earlier
// uses of its memory, and advances the clocks.
inline void launch(const c10::Stream& on, const std::string& op, const std::vector<Access>& accesses, bool blocks = true) {
  auto& w = world();
  double duration = time_of_launch(op, on);
  std::string stack;
  if (w.stack_of_launch) {
    pybind11::gil_scoped_acquire gil;
    stack = pybind11::handle(w.stack_of_launch)().cast<std::string>();
  }
  if (blocks) pass(point_now(on).gates, op + " on stream " + std::to_string(on.id()), true);
  {
    Lock lock(w.mutex);
    raise_unraised();
    auto& stream = w.stream(on);
    auto& device = w.devices[stream.device];
    join(stream.clock, w.host);
    auto count = advance(stream.clock, stream.slot);
    device.launches++;
    stream.tick = ++device.ticks;
    stream.time = std::max(stream.time, w.host_time) + duration;
    if (w.sanitizer != Sanitizer::off) {
      for (auto& access : accesses)
        check_use(stream, *access.allocation,
                  {access.begin, access.end, stream.slot, count, access.write, op, stack});
      for (auto& access : accesses)
        remember_use(stream, *access.allocation,
                     {access.begin, access.end, stream.slot, count, access.write, op, stack});
    }
  }
  deliver();
}

// The results of the newest kernel of a stream are written by it.
inline void written_by_launch(const c10::Stream& on, const std::string& op, Allocation& allocation) {
  auto& w = world();
  Lock lock(w.mutex);
  if (w.sanitizer == Sanitizer::off) return;
  auto& stream = w.stream(on);
  remember_use(stream, allocation,
               {0, allocation.size, stream.slot, seen(stream.clock, stream.slot), true, op, ""});
}

} // namespace pretend
