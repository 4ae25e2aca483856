// Streams, events and gates of the pretend devices, and what the host knows of them.
//
// Kernels run at once on the thread that launches them. What a real device would do later is kept as vector clocks: each
// launch and each recorded event is a point of its stream, and a clock holds for every stream the newest point that is
// known to be complete. One mutex guards all of it. Nobody takes the GIL while holding the mutex.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace pretend {

constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;

using Clock = std::vector<uint64_t>; // by slot of a stream

inline uint64_t seen(const Clock& clock, size_t slot) {
  return slot < clock.size() ? clock[slot] : 0;
}

inline void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t slot = 0; slot < other.size(); slot++) clock[slot] = std::max(clock[slot], other[slot]);
}

inline uint64_t advance(Clock& clock, size_t slot) {
  if (clock.size() <= slot) clock.resize(slot + 1);
  return ++clock[slot];
}

struct Gate {
  std::string name;
  bool open = false;
  std::string error; // of an open gate: raised by whoever comes to it
};
using Gates = std::vector<std::shared_ptr<Gate>>;

struct StreamState {
  int device;
  int64_t id;
  size_t slot;
  Clock clock;
  Gates gates; // later kernels of this stream wait for them
  double time = 0; // milliseconds of the fake clock
  long tick = 0; // of the device, at the last launch
  std::string name() const {
    return "stream " + std::to_string(id) + " of pretend:" + std::to_string(device);
  }
};

struct Point { // a moment of a stream, as a recorded event keeps it
  size_t slot = 0;
  int device = 0;
  Clock clock;
  Gates gates;
  double time = 0;
  long tick = 0;
};

struct Event {
  Point point;
};

struct DeviceState {
  long ticks = 0; // launches and queries
  long launches = 0;
  int64_t next_stream = 1;
};

struct Use { // of a range of bytes, by a kernel
  size_t begin, end;
  size_t slot;
  uint64_t count; // the point of its stream
  bool write;
  std::string op, stack;
};

struct LateCopy { // between the device and pinned memory: done when its point is complete
  Point point;
  const void* host; // the pinned storage
  std::function<void()> deliver;
};

enum class Sanitizer { off, collect, raise };

struct World {
  std::mutex mutex;
  std::condition_variable gate_opened;
  std::vector<DeviceState> devices;
  int visible = 0;
  int threads = 0; // of autograd
  std::vector<std::unique_ptr<StreamState>> streams; // by slot
  std::map<std::pair<int, int64_t>, size_t> slots;
  Clock host; // what a host thread has seen to be complete
  double host_time = 0;
  double gate_limit = 30;
  bool runs_ahead = false; // launches go on when the limit is over
  bool ran_ahead = false; // one has: the others wait no more
  long lag = 0;
  std::optional<double> step; // milliseconds a launch; none: the real clock
  std::map<std::string, long> waits;
  Sanitizer sanitizer = Sanitizer::raise;
  std::vector<std::string> errors;
  std::vector<std::string> unraised; // errors found where nothing can be raised
  std::mutex delivery;
  std::vector<LateCopy> late_copies;
  // Python callables, used with the GIL only
  PyObject* on_wait = nullptr;
  PyObject* on_launch = nullptr; // op, device, stream -> milliseconds
  PyObject* stack_of_launch = nullptr;

  World() {
    const char* count = std::getenv("WEFT_PRETEND_DEVICES");
    visible = count ? std::max(0, std::min(64, std::atoi(count))) : 4;
    threads = std::max(4, visible);
    devices.resize(64);
  }

  StreamState& stream(int device, int64_t id) {
    auto [place, is_new] = slots.try_emplace({device, id}, streams.size());
    if (is_new) {
      auto state = std::make_unique<StreamState>();
      state->device = device;
      state->id = id;
      state->slot = streams.size();
      streams.push_back(std::move(state));
    }
    return *streams[place->second];
  }
  StreamState& stream(const c10::Stream& stream) {
    return this->stream(stream.device_index(), stream.id());
  }
};

inline World& world() {
  static World* instance = new World(); // never destroyed: threads may outlive main
  return *instance;
}

using Lock = std::unique_lock<std::mutex>;

inline thread_local int current_device = 0;
inline thread_local std::map<int, int64_t> current_streams;

inline c10::Device device_of_index(int index) {
  return {DEVICE_TYPE, static_cast<c10::DeviceIndex>(index < 0 ? current_device : index)};
}

inline c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device_of_index(device), id);
}

inline c10::Stream current_stream(int device) {
  auto place = current_streams.find(device);
  return stream_of(device, place == current_streams.end() ? 0 : place->second);
}

inline void check_index(int index) {
  TORCH_CHECK(index >= 0 && index < world().visible, "invalid device ordinal: pretend:", index, " (visible devices: ",
              world().visible, ")");
}

template <class Function>
void without_gil(const Function& function) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    pybind11::gil_scoped_release release;
    function();
  } else {
    function();
  }
}

// ---- gates

inline void drop_open(Gates& gates) {
  gates.erase(std::remove_if(gates.begin(), gates.end(), [](auto& gate) { return gate->open && gate->error.empty(); }),
              gates.end());
}

inline void add_gates(Gates& gates, const Gates& more) {
  for (auto& gate : more)
    if ((!gate->open || !gate->error.empty()) && std::find(gates.begin(), gates.end(), gate) == gates.end()) gates.push_back(gate);
}

inline bool all_open(const Gates& gates) {
  return std::all_of(gates.begin(), gates.end(), [](auto& gate) { return gate->open; });
}

inline bool has_error(const Gates& gates) {
  return std::any_of(gates.begin(), gates.end(), [](auto& gate) { return !gate->error.empty(); });
}

inline void raise_error_of(const Gates& gates) {
  for (auto& gate : gates) TORCH_CHECK(gate->error.empty(), gate->error);
}

// Returns false if a gate is still closed after `seconds`.
inline bool wait_for_gates(const Gates& gates, double seconds) {
  bool open = true;
  without_gil([&] {
    Lock lock(world().mutex);
    open = world().gate_opened.wait_for(
        lock, std::chrono::duration<double>(seconds), [&] { return all_open(gates); });
  });
  return open;
}

// Blocks until the gates are open. The caller holds no lock.
inline void pass(Gates gates, const std::string& what, bool is_launch) {
  double limit;
  {
    Lock lock(world().mutex);
    drop_open(gates);
    if (gates.empty()) return;
    limit = is_launch && world().ran_ahead ? 0 : world().gate_limit;
  }
  bool open = wait_for_gates(gates, limit);
  std::string names;
  Lock lock(world().mutex);
  raise_error_of(gates);
  if (open) return;
  if (is_launch && world().runs_ahead) {
    world().ran_ahead = true;
    return;
  }
  for (auto& gate : gates)
    if (!gate->open) names += (names.empty() ? "" : ", ") + gate->name;
  TORCH_CHECK(false, what, " waited ", limit, " s for a gate that stayed closed: ", names);
}

// ---- what is complete

inline bool is_complete(const Point& point) {
  auto& w = world();
  raise_error_of(point.gates);
  if (seen(w.host, point.slot) >= seen(point.clock, point.slot)) return true;
  return all_open(point.gates) && w.devices[point.device].ticks - point.tick >= w.lag;
}

inline Point point_of(const StreamState& stream) {
  return {stream.slot, stream.device, stream.clock, stream.gates, stream.time, stream.tick};
}

// Copies that are complete by now reach their host memory. The caller holds no lock.
inline void deliver(const void* host = nullptr) {
  auto& w = world();
  std::vector<std::function<void()>> due; // outlives the lock: what it frees may need the GIL
  Lock one_at_a_time(w.delivery);
  {
    Lock lock(w.mutex);
    if (w.late_copies.empty()) return;
    std::vector<LateCopy> rest;
    for (auto& copy : w.late_copies)
      if ((host && copy.host == host) || !has_error(copy.point.gates) && is_complete(copy.point)) due.push_back(std::move(copy.deliver));
      else rest.push_back(std::move(copy));
    w.late_copies = std::move(rest);
  }
  for (auto& deliver_copy : due) deliver_copy();
}

// ---- waits of the host

inline void count_wait(const std::string& kind, const std::string& op = "") {
  PyObject* callback;
  {
    Lock lock(world().mutex);
    world().waits[kind]++;
    callback = world().on_wait;
  }
  if (!callback) return;
  pybind11::gil_scoped_acquire gil;
  pybind11::handle handle(callback);
  handle(kind, op);
}

// The host now knows that `point` is complete.
inline void see(const Point& point) {
  {
    Lock lock(world().mutex);
    join(world().host, point.clock);
    world().host_time = std::max(world().host_time, point.time);
  }
  deliver();
}

inline void host_waits(const std::string& kind, const Point& point, const std::string& op = "") {
  count_wait(kind, op);
  pass(point.gates, kind, false);
  see(point);
}

inline Point point_now(const c10::Stream& stream) {
  Lock lock(world().mutex);
  return point_of(world().stream(stream));
}

// ---- fake time

inline double real_time() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

inline double time_of_launch(const std::string& op, const c10::Stream& stream) {
  auto& w = world();
  if (!w.on_launch) return w.step.value_or(0);
  pybind11::gil_scoped_acquire gil;
  return pybind11::handle(w.on_launch)(op, int(stream.device_index()), int64_t(stream.id())).cast<double>();
}

} // namespace pretend
