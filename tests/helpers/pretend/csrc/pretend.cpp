// The extension module: registers the device, and lets tests see and steer it.
#include <torch/csrc/utils/pybind.h>

#include "autocast.h"
#include "kernels.h"
#include "process_group.h"
#include "recurrent.h"

namespace pretend {

static const bool registered = [] {
  c10::SetAllocator(DEVICE_TYPE, &device_allocator());
  at::setHostAllocator(DEVICE_TYPE, &PinnedAllocator::instance());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

static void set_callable(PyObject*& place, const pybind11::object& callable) {
  Py_XDECREF(place);
  place = callable.is_none() ? nullptr : callable.inc_ref().ptr();
}

static long launches(int device) {
  Lock lock(world().mutex);
  if (device >= 0) return world().devices.at(device).launches;
  long sum = 0;
  for (auto& state : world().devices) sum += state.launches;
  return sum;
}

static void set_clock(std::optional<double> step, const pybind11::object& callable) {
  set_callable(world().on_launch, callable);
  Lock lock(world().mutex);
  world().step = step;
  world().host_time = 0;
  for (auto& stream : world().streams) stream->time = 0;
}

static at::Tensor host_alias(const at::Tensor& tensor) {
  TORCH_CHECK(is_ours(tensor), "host_alias needs a tensor of the pretend device, not of ", tensor.device());
  return tensor_on(storage_on_cpu(tensor.storage()), c10::DispatchKey::CPU, tensor);
}

// An operation that something else executes, such as a collective, on tensors that it reads and writes.
static void enqueue(const c10::Stream& stream, const std::string& op, const std::vector<at::Tensor>& reads,
                    const std::vector<at::Tensor>& writes) {
  std::vector<Access> accesses;
  auto add = [&](const at::Tensor& tensor, bool write) {
    auto [begin, end] = span_of(tensor);
    auto* allocation = allocation_of(tensor.storage().data_ptr());
    if (allocation && end > begin) accesses.push_back({allocation, begin, end, write});
  };
  for (auto& tensor : reads) add(tensor, false);
  for (auto& tensor : writes) add(tensor, true);
  launch(stream, op, accesses, false);
}

static void open_gate(Gate& gate, const std::string& error) {
  {
    Lock lock(world().mutex);
    gate.open = true;
    gate.error = error;
  }
  world().gate_opened.notify_all();
}

static void block_stream(const c10::Stream& stream, const std::shared_ptr<Gate>& gate) {
  Lock lock(world().mutex);
  add_gates(world().stream(stream).gates, {gate});
}

static Gates closed_gates(const c10::Stream& stream) {
  Lock lock(world().mutex);
  auto& gates = world().stream(stream).gates;
  drop_open(gates);
  return gates;
}

} // namespace pretend

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace pretend;
  namespace py = pybind11;
  using Locked = py::call_guard<py::gil_scoped_release>;

  m.def("device_count", [] { return world().visible; });
  m.def("set_device_count", [](int count) { world().visible = count; });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("host_alias", &host_alias);

  m.def("waits", [] { Lock lock(world().mutex); return world().waits; });
  m.def("reset_waits", [] { Lock lock(world().mutex); world().waits.clear(); });
  m.def("on_wait", [](const py::object& callable) { set_callable(world().on_wait, callable); });
  m.def("launches", &launches);
  m.def("set_lag", [](long lag) { { Lock lock(world().mutex); world().lag = lag; } deliver(); }, Locked());
  m.def("set_clock", &set_clock);
  m.def("advance", [](const c10::Stream& stream, double time) {
    Lock lock(world().mutex);
    world().stream(stream).time += time;
  });
  m.def("stream_time", [](const c10::Stream& stream) {
    Lock lock(world().mutex);
    return world().stream(stream).time;
  });

  m.def("set_sanitizer", [](const std::string& mode) {
    Lock lock(world().mutex);
    world().sanitizer = mode == "raise" ? Sanitizer::raise : mode == "collect" ? Sanitizer::collect : Sanitizer::off;
  });
  m.def("errors", [] { Lock lock(world().mutex); return world().errors; });
  m.def("reset_errors", [] { Lock lock(world().mutex); world().errors.clear(); world().unraised.clear(); });
  m.def("stack_of_launch", [](const py::object& callable) { set_callable(world().stack_of_launch, callable); });
  m.def("enqueue", &enqueue);

  py::class_<Gate, std::shared_ptr<Gate>>(m, "Gate")
      .def(py::init([](std::string name) { return std::make_shared<Gate>(Gate{std::move(name)}); }), py::arg("name"))
      .def_readonly("name", &Gate::name)
      .def_property_readonly("is_open", [](Gate& gate) { Lock lock(world().mutex); return gate.open; })
      .def("open", &open_gate, py::arg("error") = "")
      .def("wait", [](const std::shared_ptr<Gate>& gate, double seconds) { return wait_for_gates({gate}, seconds); });
  m.def("block_stream", &block_stream);
  m.def("closed_gates", &closed_gates);
  py::class_<ProcessGroupBackend, c10d::Backend, c10::intrusive_ptr<ProcessGroupBackend>>(m, "ProcessGroupBackend")
      .def(py::init<int, int, py::object>());
  m.def("set_gate_limit", [](double seconds, bool runs_ahead) {
    Lock lock(world().mutex);
    world().gate_limit = seconds;
    world().runs_ahead = runs_ahead;
    world().ran_ahead = false;
  });
}
