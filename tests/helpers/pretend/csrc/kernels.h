// Kernels: nearly every operator runs the CPU's kernel on the same bytes, seen as CPU tensors.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <unordered_map>

#include "device.h"

namespace pretend {

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

// The bytes of a storage that a tensor spans.
inline std::pair<size_t, size_t> span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  int64_t first = tensor.storage_offset(), last = first;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {first * tensor.itemsize(), (last + 1) * tensor.itemsize()};
}

inline c10::Storage storage_on_cpu(const c10::Storage& storage) {
  auto* kept = new c10::Storage(storage);
  auto pointer = c10::DataPtr(const_cast<void*>(storage.data()), kept,
                              [](void* context) { delete static_cast<c10::Storage*>(context); }, c10::Device(c10::kCPU));
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(pointer),
                                               at::getCPUAllocator(), true);
}

inline at::Tensor tensor_on(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// One call of a CPU kernel on tensors of a device: `in` for each argument, `start`, the kernel, `out` for each result.
class Call {
 public:
  explicit Call(std::string op, bool is_launch = true) : op_(std::move(op)), is_launch_(is_launch) {}

  at::Tensor in(const at::Tensor& tensor, bool write = false, bool cpu_allowed = false) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      if (tensor.dim() > 0 && !cpu_allowed) foreign_ = tensor.device();
      return tensor;
    }
    TORCH_CHECK(tensor.layout() == c10::kStrided, "the pretend device has strided tensors only (", op_, ")");
    if (!device_) device_ = tensor.device();
    else if (*device_ != tensor.device()) foreign_ = tensor.device();
    auto [begin, end] = span_of(tensor);
    auto* allocation = allocation_of(tensor.storage().data_ptr());
    if (allocation && end > begin) accesses_.push_back({allocation, begin, end, write});
    auto& cpu = cpu_storage_[tensor.storage().unsafeGetStorageImpl()];
    if (!cpu) {
      cpu = storage_on_cpu(tensor.storage());
      ours_.emplace(cpu.unsafeGetStorageImpl(), tensor.storage());
    }
    auto alias = tensor_on(cpu, c10::DispatchKey::CPU, tensor);
    arguments_.push_back({alias, tensor, write});
    return alias;
  }

  void on(c10::Device device) {
    if (!device_) device_ = device_of_index(device.index());
  }

  c10::Device device() const {
    TORCH_CHECK(device_, op_, " has no tensor of the pretend device");
    return *device_;
  }

  bool has_device() const {
    return device_.has_value();
  }

  void start() {
    if (device_ && foreign_)
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device_,
                  " and ", *foreign_, "! (", op_, ")");
    if (is_launch_) launch(current_stream(device().index()), op_, accesses_);
  }

  at::Tensor out(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (auto& argument : arguments_)
      if (argument.alias.is_same(result)) return argument.tensor;
    auto& storage = ours_[result.storage().unsafeGetStorageImpl()];
    if (!storage) storage = adopt(result.storage());
    return tensor_on(storage, c10::DispatchKey::PrivateUse1, result);
  }

  // A kernel may have resized what it wrote.
  void finish() {
    for (auto& argument : arguments_) {
      if (!argument.write) continue;
      auto cpu = argument.alias.storage();
      auto ours = argument.tensor.storage();
      if (cpu.data() != ours.data() || cpu.nbytes() != ours.nbytes()) {
        ours.set_data_ptr_noswap(tracked(cpu));
        ours.set_nbytes(cpu.nbytes());
      }
      if (argument.alias.sizes() != argument.tensor.sizes() || argument.alias.strides() != argument.tensor.strides())
        argument.tensor.unsafeGetTensorImpl()->set_sizes_and_strides(argument.alias.sizes(), argument.alias.strides(),
                                                                     argument.alias.storage_offset());
    }
  }

 private:
  struct Argument {
    at::Tensor alias, tensor;
    bool write;
  };

  c10::DataPtr tracked(const c10::Storage& cpu) {
    auto pointer = device_allocator().adopt(cpu, device().index());
    if (is_launch_) written_by_launch(current_stream(device().index()), op_, *allocation_of(pointer));
    return pointer;
  }

  c10::Storage adopt(const c10::Storage& cpu) {
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), cpu.nbytes(), tracked(cpu),
                                                 &device_allocator(), true);
  }

  std::string op_;
  bool is_launch_;
  std::optional<c10::Device> device_, foreign_;
  std::vector<Access> accesses_;
  std::vector<Argument> arguments_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_storage_; // of our storages
  std::unordered_map<c10::StorageImpl*, c10::Storage> ours_; // of CPU storages
};

// ---- the boxed kernel of every operator without one of its own

struct OpFacts {
  std::string name; // with the overload
  bool is_launch = true;
  bool host_waits = false;
  bool cpu_allowed = false;
  bool takes_mask = false;
};

inline OpFacts facts_of(const c10::FunctionSchema& schema) {
  static const std::set<std::string> waiting = {
      "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::is_nonzero",
      "aten::_linalg_check_errors", "aten::histc"};
  static const std::set<std::string> free = {"aten::is_set_to", "aten::is_same_size", "aten::_fused_sdp_choice"};
  static const std::set<std::string> mixing = {
      "aten::_foreach_addcmul", "aten::_foreach_addcmul_", "aten::_foreach_addcdiv", "aten::_foreach_addcdiv_",
      "aten::_pack_padded_sequence", "aten::_ctc_loss"};
  auto& name = schema.name();
  OpFacts facts;
  facts.name = name + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  facts.host_waits = waiting.count(name) || (facts.name == "aten::repeat_interleave.Tensor");
  facts.takes_mask = name == "aten::index" || name == "aten::index_put" || name == "aten::index_put_" ||
      name == "aten::_index_put_impl_" || name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put";
  facts.cpu_allowed = facts.takes_mask || mixing.count(name);
  for (auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) facts.is_launch = false; // a view
  if (free.count(name)) facts.is_launch = false;
  return facts;
}

inline const OpFacts& facts(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<const c10::FunctionSchema*, OpFacts>();
  Lock lock(mutex);
  auto* schema = &op.schema();
  auto place = known->find(schema);
  if (place == known->end()) place = known->emplace(schema, facts_of(*schema)).first;
  return place->second;
}

inline bool is_mask(const at::Tensor& index) {
  return index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
}

inline void count_waits_of_indices(const c10::IValue& value, const OpFacts& op) {
  if (!value.isOptionalTensorList() && !value.isTensorList()) return;
  bool mask = false, from_host = false;
  auto look = [&](const at::Tensor& index) {
    mask |= is_mask(index);
    from_host |= index.defined() && !is_ours(index) && index.dim() > 0;
  };
  if (value.isTensorList())
    for (const at::Tensor& index : value.toTensorVector()) look(index);
  else
    for (const auto& index : value.toOptionalTensorVector())
      if (index) look(*index);
  if (mask) count_wait("nonzero", op.name);
  if (from_host) count_wait("copy to device", op.name);
}

inline void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& known = facts(op);
  auto& parameters = op.schema().arguments();
  auto begin = stack->size() - parameters.size();
  Call call(known.name, known.is_launch);
  std::vector<size_t> generators;
  for (size_t index = 0; index < parameters.size(); index++) {
    auto& value = (*stack)[begin + index];
    bool write = parameters[index].alias_info() && parameters[index].alias_info()->isWrite();
    if (known.takes_mask) count_waits_of_indices(value, known);
    if (value.isTensor()) {
      value = call.in(value.toTensor(), write, known.cpu_allowed);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(call.in(tensor, write, known.cpu_allowed));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<at::Tensor>(call.in(*tensor, write, known.cpu_allowed)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == DEVICE_TYPE) {
      call.on(value.toDevice());
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator() || (value.isNone() && *parameters[index].type() ==
                                           *c10::OptionalType::create(c10::GeneratorType::get()))) {
      generators.push_back(begin + index);
    }
  }
  if (!call.has_device()) call.on(device_of_index(-1));
  for (auto place : generators) {
    auto& value = (*stack)[place];
    value = inner_generator(value.isNone() ? default_generator(call.device().index()) : value.toGenerator());
  }
  call.start();
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.finish();
  auto results = stack->size() - op.schema().returns().size();
  for (size_t index = results; index < stack->size(); index++) {
    auto& value = (*stack)[index];
    if (value.isTensor()) {
      value = call.out(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(call.out(tensor));
      value = list;
    }
  }
  if (known.host_waits) host_waits(known.name.substr(6), point_now(current_stream(call.device().index())), known.name);
}

// ---- memory and views

inline int index_of(std::optional<at::Device> device) {
  int index = device_of_index(device ? device->index() : -1).index();
  check_index(index);
  return index;
}

struct AllocatorOf final : c10::Allocator { // of one device, for the generic functions of ATen
  int device;
  explicit AllocatorOf(int index) : device(index) {}
  c10::DataPtr allocate(size_t size) override {
    return device_allocator().allocate_on(size, device);
  }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    std::memcpy(target, source, size);
  }
};

inline c10::Allocator* allocator_of(int device) {
  static auto* allocators = [] {
    auto* all = new std::vector<std::unique_ptr<AllocatorOf>>();
    for (int index = 0; index < 64; index++) all->push_back(std::make_unique<AllocatorOf>(index));
    return all;
  }();
  return allocators->at(device).get();
}

inline at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic_symint(size, allocator_of(index_of(device)),
                                          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                          c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return at::detail::empty_strided_symint_generic(size, stride, allocator_of(index_of(device)),
                                                  c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                  c10::dtype_or_default(dtype));
}

inline at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

inline at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                             std::optional<c10::SymInt> offset) {
  auto place = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), place);
}

inline at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

inline at::Tensor& set_storage_and_shape(at::Tensor& self, at::Storage storage, c10::SymInt offset,
                                         c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_meta__symint(self, std::move(storage), std::move(offset), size, stride);
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  auto count = c10::SymInt(static_cast<int64_t>(storage.nbytes() / self.itemsize()));
  return set_storage_and_shape(self, std::move(storage), 0, {count}, {});
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_and_shape(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(),
                               source.sym_strides());
}

inline at::Tensor& set_nothing(at::Tensor& self) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                       allocator_of(self.device().index()), true);
  return set_storage_and_shape(self, c10::Storage(storage), 0, {c10::SymInt(0)}, {});
}

inline const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto count = c10::multiply_integers(sizes);
  size_t needed = count == 0 ? 0 : (count + self.storage_offset()) * self.itemsize();
  if (self.storage().nbytes() < needed) resize_storage(self.storage(), needed);
  if (self.sizes() != sizes) self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

inline void record_stream(at::Tensor& self, at::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// ---- copies

inline bool is_pinned(const at::Tensor& tensor) {
  return PinnedAllocator::instance().holds(tensor.storage().data());
}

// What a late copy keeps: no Python object belongs to it, and no mode of Python sees the copy.
inline at::Tensor kept(const at::Tensor& host) {
  return tensor_on(host.storage(), c10::DispatchKey::CPU, host);
}

inline void to_host_late(const at::Tensor& source, const at::Tensor& host, Point point) {
  auto bytes = source.clone();
  auto target = kept(host);
  auto [begin, end] = span_of(target);
  if (target.scalar_type() != at::kBool && target.is_non_overlapping_and_dense())
    std::memset(static_cast<char*>(const_cast<void*>(target.storage().data())) + begin, 0xff, end - begin);
  Lock lock(world().mutex);
  world().late_copies.push_back({std::move(point), target.storage().data(), [bytes, target] {
    c10::impl::ExcludeDispatchKeyGuard no_python(c10::DispatchKey::Python);
    target.copy_(bytes);
  }});
}

inline at::Tensor as_bytes(const at::Tensor& host) {
  return host.contiguous().reshape({-1}).view(at::kByte);
}

inline void check_source_later(const at::Tensor& host, Point point) {
  auto bytes = host.clone();
  auto source = kept(host);
  auto check = [bytes, source] {
    c10::impl::ExcludeDispatchKeyGuard no_python(c10::DispatchKey::Python);
    if (at::equal(as_bytes(bytes), as_bytes(source))) return; // NaN is not equal to NaN
    Lock lock(world().mutex);
    if (world().sanitizer != Sanitizer::off)
      report("stream sanitizer: pinned memory was changed before the copy to the device that reads it was complete; wait "
             "for an event first", false);
  };
  Lock lock(world().mutex);
  world().late_copies.push_back({std::move(point), nullptr, check});
}

inline at::Tensor copy_between_devices(const at::Tensor& source, const at::Tensor& target) {
  Guard guard;
  auto from = current_stream(source.device().index()), to = current_stream(target.device().index());
  void *ready = nullptr, *done = nullptr;
  guard.record(&ready, to, to.device_index(), c10::EventFlag::PYTORCH_DEFAULT);
  guard.block(ready, from);
  Call reading("aten::copy_"), writing("aten::copy_");
  auto cpu_source = reading.in(source), cpu_target = writing.in(target, true);
  reading.start();
  guard.record(&done, from, from.device_index(), c10::EventFlag::PYTORCH_DEFAULT);
  guard.block(done, to);
  writing.start();
  cpu_target.copy_(cpu_source);
  guard.destroyEvent(ready, 0);
  guard.destroyEvent(done, 0);
  return target;
}

inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  bool from_device = is_ours(source), to_device = is_ours(target);
  if (from_device && to_device && source.device() != target.device()) return copy_between_devices(source, target);
  const auto& host = from_device ? target : source;
  bool between = from_device != to_device;
  bool waits = between && !(non_blocking && is_pinned(host));
  if (between) deliver(host.storage().data());
  Call call("aten::copy_");
  auto cpu_source = call.in(source, false, true), cpu_target = call.in(target, true, true);
  call.start();
  auto point = point_now(current_stream(call.device().index()));
  bool late = between && !waits && world().lag > 0;
  if (late && from_device) to_host_late(cpu_source, cpu_target, point);
  else cpu_target.copy_(cpu_source);
  if (late && to_device) check_source_later(source, point);
  if (waits) host_waits(from_device ? "copy to host" : "copy to device", point);
  return target;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

inline void foreach_copy(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  bool one_device = !targets.empty() && targets.size() == sources.size();
  for (auto& tensor : sources) one_device &= tensor.device() == targets[0].device();
  for (auto& tensor : targets) one_device &= tensor.device() == targets[0].device();
  if (!one_device) {
    TORCH_CHECK(targets.size() == sources.size(), "_foreach_copy_ needs lists of the same length");
    for (size_t index = 0; index < targets.size(); index++) targets[index].copy_(sources[index], non_blocking);
    return;
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  Call call("aten::_foreach_copy_");
  std::vector<at::Tensor> cpu_targets, cpu_sources;
  for (auto& tensor : targets) cpu_targets.push_back(call.in(tensor, true));
  for (auto& tensor : sources) cpu_sources.push_back(call.in(tensor));
  call.start();
  at::_foreach_copy_(cpu_targets, cpu_sources);
}

inline at::Scalar local_scalar(const at::Tensor& self) {
  Call call("aten::_local_scalar_dense");
  auto cpu = call.in(self);
  call.start();
  host_waits("item", point_now(current_stream(call.device().index())));
  return cpu.item();
}

// ---- operators whose CPU kernel is not reached by the operator's own name

inline std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Call call("aten::native_dropout");
  auto cpu = call.in(input);
  call.start();
  if (input.numel() == 0 || !train.value_or(true))
    return {call.out(cpu.clone()), call.out(at::ones(cpu.sizes(), cpu.options().dtype(at::kBool)))};
  auto generator = inner_generator(default_generator(input.device().index()));
  // as the CPU's dropout computes it, so that equal seeds have equal bits
  auto noise = at::empty_like(cpu).bernoulli_(1 - p, generator);
  auto mask = noise.to(at::kBool);
  return {call.out(cpu * noise.div_(1 - p)), call.out(mask)};
}

inline at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                              c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                              bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Call call("aten::convolution");
  auto x = call.in(input), w = call.in(weight);
  auto b = bias ? std::optional<at::Tensor>(call.in(*bias)) : std::nullopt;
  call.start();
  return call.out(at::convolution_symint(x, w, b, stride, padding, dilation, transposed, output_padding, groups));
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Call call("aten::convolution_backward");
  auto g = call.in(gradient), x = call.in(input), w = call.in(weight);
  call.start();
  auto channels = transposed ? w.sym_size(1) * groups : w.sym_size(0);
  auto [dx, dw, db] = at::convolution_backward_symint(g, x, w, c10::SymIntArrayRef(&channels, 1), stride, padding,
                                                      dilation, transposed, output_padding, groups, mask);
  return {call.out(dx), call.out(dw), call.out(db)};
}

// Attention takes the kernel that the CPU would take.
inline int64_t attention_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                const std::optional<at::Tensor>& mask, double p, bool causal, std::optional<double> scale,
                                bool grouped) {
  Call call("aten::_fused_sdp_choice", false);
  auto q = call.in(query), k = call.in(key), v = call.in(value);
  auto m = mask ? std::optional<at::Tensor>(call.in(*mask)) : std::nullopt;
  for (auto* tensor : {&q, &k, &v}) // the choice depends on it
    if (at::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() || value.requires_grad()))
      tensor->unsafeGetTensorImpl()->set_requires_grad(true);
  auto choice = at::_fused_sdp_choice(q, k, v, m, p, causal, scale, grouped);
  bool is_flash = choice == static_cast<int64_t>(at::SDPBackend::flash_attention);
  return static_cast<int64_t>(is_flash ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor,
                  at::Tensor>
attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias,
          double p, bool causal, bool, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Call call("aten::_scaled_dot_product_flash_attention");
  auto q = call.in(query), k = call.in(key), v = call.in(value);
  auto m = bias && bias->defined() ? std::optional<at::Tensor>(call.in(*bias)) : std::nullopt;
  call.start();
  auto [result, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, m, scale);
  at::Tensor none;
  return {call.out(result), call.out(logsumexp), none, none, query.sym_size(2), key.sym_size(2), none, none, none};
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4>, const at::Tensor& result, const at::Tensor& logsumexp, const at::Tensor&,
    const at::Tensor&, c10::SymInt, c10::SymInt, double p, bool causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Call call("aten::_scaled_dot_product_flash_attention_backward");
  auto g = call.in(gradient), q = call.in(query), k = call.in(key), v = call.in(value);
  auto m = bias.defined() ? std::optional<at::Tensor>(call.in(bias)) : std::nullopt;
  auto r = call.in(result), l = call.in(logsumexp);
  call.start();
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, r, l, p, causal, m, scale);
  return {call.out(dq), call.out(dk), call.out(dv), at::Tensor()};
}

inline std::string unqualified(const c10::OperatorName& name) {
  return name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
}

// The fallback is not asked for operators that have a kernel for any device. Some of them have a better one for the CPU:
// structured operators, normalizations. Those for lists of tensors are one launch where the generic kernel has a loop.
inline bool prefers_cpu_kernel(const c10::OperatorName& name) {
  if (name.name.rfind("aten::", 0) != 0 || name.name == "aten::_foreach_copy_") return false;
  if (name.name.rfind("aten::_foreach_", 0) == 0) return name.overload_name.find("out") == std::string::npos;
  auto op = c10::Dispatcher::singleton().findOp(name);
  if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return false;
  return op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
      op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_and_shape));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_foreach_copy_", TORCH_FN(foreach_copy));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("native_dropout", TORCH_FN(dropout));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  m.impl("_fused_sdp_choice", TORCH_FN(attention_choice));
  m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(attention));
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(attention_backward));
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (prefers_cpu_kernel(name)) m.impl(unqualified(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

} // namespace pretend

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &pretend::attention_choice);
}
