// What PyTorch asks of a device: current device and stream, events, generators, pinned memory.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace pretend {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return DEVICE_TYPE;
  }
  c10::Device getDevice() const override {
    return device_of_index(current_device);
  }
  void setDevice(c10::Device device) const override {
    check_index(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    if (device.index() >= 0) setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(world().threads); // autograd starts as many threads at its first backward
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device_of_index(device.index()).index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.index(), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto index = device_of_index(device.index()).index();
    check_index(index);
    Lock lock(world().mutex);
    auto& stream = world().stream(index, world().devices[index].next_stream++);
    return stream_of(index, stream.id);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& on) const override {
    bool complete;
    Point point;
    {
      Lock lock(world().mutex);
      auto& stream = world().stream(on);
      point = point_of(stream);
      complete = is_complete(point);
      world().devices[stream.device].ticks++;
      if (complete) join(world().host, point.clock);
    }
    deliver();
    if (!complete) count_wait("poll");
    return complete;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits("stream synchronize", point_now(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Point all;
    {
      Lock lock(world().mutex);
      for (auto& stream : world().streams) {
        if (stream->device != device) continue;
        join(all.clock, stream->clock);
        add_gates(all.gates, stream->gates);
        all.time = std::max(all.time, stream->time);
      }
    }
    host_waits("device synchronize", all);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator().recordStream(pointer, stream);
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    Lock lock(world().mutex);
    auto& stream = world().stream(on);
    join(stream.clock, world().host);
    advance(stream.clock, stream.slot);
    drop_open(stream.gates);
    auto& point = static_cast<Event*>(*event)->point;
    point = point_of(stream);
    point.tick = world().devices[stream.device].ticks;
    if (!world().step && !world().on_launch) point.time = real_time();
  }
  void block(void* event, const c10::Stream& on) const override {
    if (!event) return;
    Lock lock(world().mutex);
    auto& stream = world().stream(on);
    auto& point = static_cast<Event*>(event)->point;
    join(stream.clock, point.clock);
    add_gates(stream.gates, point.gates);
    if (world().step || world().on_launch) stream.time = std::max(stream.time, point.time);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    bool complete;
    {
      Lock lock(world().mutex);
      auto& point = static_cast<Event*>(event)->point;
      complete = is_complete(point);
      world().devices[point.device].ticks++;
      if (complete) join(world().host, point.clock);
    }
    deliver();
    if (!complete) count_wait("poll");
    return complete;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Point point;
    {
      Lock lock(world().mutex);
      point = static_cast<Event*>(event)->point;
    }
    host_waits("event synchronize", point);
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && last, "both events must be recorded before their elapsed time is asked for");
    Lock lock(world().mutex);
    auto& begin = static_cast<Event*>(first)->point;
    auto& end = static_cast<Event*>(last)->point;
    TORCH_CHECK(is_complete(begin) && is_complete(end), "both events must be complete before their elapsed time is asked for");
    return end.time - begin.time;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    Lock lock(world().mutex);
    delete static_cast<Event*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A generator of the device: the CPU's algorithm with a state of its own.
struct Generator final : c10::GeneratorImpl {
  at::Generator inner;

  explicit Generator(int device, at::Generator cpu = at::detail::createCPUGenerator())
      : GeneratorImpl(device_of_index(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(cpu)) {}

  static c10::DeviceType device_type() {
    return DEVICE_TYPE;
  }
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "generators of the pretend device have no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "generators of the pretend device have no offset");
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    auto seed = c10::detail::getNonDeterministicRandom();
    inner.set_current_seed(seed);
    return seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    return new Generator(device_.index(), inner.clone());
  }
};

inline const at::Generator& default_generator(int device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (int index = 0; index < 64; index++) all->push_back(at::make_generator<Generator>(index));
    return all;
  }();
  return generators->at(device_of_index(device).index());
}

// The CPU generator that the CPU's kernels accept.
inline at::Generator inner_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == DEVICE_TYPE,
              "Expected a 'pretend' device type for generator but found '", generator.device().type(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return world().visible > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(world().visible);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    check_index(device);
    current_device = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    if (device >= 0) setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return PinnedAllocator::instance().holds(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &PinnedAllocator::instance();
  }
  at::Device getDeviceFromPtr(void*) const override {
    return device_of_index(current_device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device_of_index(device).index());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override;
};

inline void resize_storage(const c10::Storage& storage, size_t size) {
  auto bytes = device_allocator().allocate_on(size, storage.device().index());
  if (auto kept = std::min(size, storage.nbytes())) std::memcpy(bytes.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(bytes));
  storage.set_nbytes(size);
}

inline void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const {
  resize_storage(storage, size);
}

} // namespace pretend
