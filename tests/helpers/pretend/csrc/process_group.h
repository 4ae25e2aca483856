// A backend of torch.distributed whose work is done in Python (`nccl.py`).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "device.h"

namespace pretend {

// A Python object that may be released on any thread.
inline std::shared_ptr<pybind11::object> shared(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* held) {
            if (!Py_IsInitialized()) return;
            pybind11::gil_scoped_acquire gil;
            delete held;
          }};
}

// `work` has: `wait()`, `is_completed()`, `error()` (text or None), and the stream that it runs on.
class PythonWork final : public c10d::Work {
 public:
  PythonWork(int rank, c10d::OpType type, pybind11::object work, std::vector<at::Tensor> results)
      : Work(rank, type), work_(shared(std::move(work))), results_(std::move(results)) {}

  bool isCompleted() override {
    pybind11::gil_scoped_acquire gil;
    return work_->attr("is_completed")().cast<bool>();
  }
  bool isSuccess() const override {
    pybind11::gil_scoped_acquire gil;
    return work_->attr("error")().is_none();
  }
  std::exception_ptr exception() const override {
    pybind11::gil_scoped_acquire gil;
    auto error = work_->attr("error")();
    return error.is_none() ? nullptr : std::make_exception_ptr(std::runtime_error(error.cast<std::string>()));
  }
  std::vector<at::Tensor> result() override {
    return results_;
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    pybind11::gil_scoped_acquire gil;
    work_->attr("wait")();
  }
  void blockCurrentStream() override {
    synchronize();
  }
  // Complete at once, as NCCL's: what comes after it waits on its stream.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (future_) return future_;
    auto stream = [&] {
      pybind11::gil_scoped_acquire gil;
      return work_->attr("stream").cast<c10::Stream>();
    }();
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{stream.device()});
    Guard guard;
    auto before = guard.exchangeStream(stream);
    future_->markCompleted(c10::IValue(results_));
    guard.exchangeStream(before);
    return future_;
  }

 private:
  std::shared_ptr<pybind11::object> work_;
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// `communicator` has: `start(op, inputs, outputs, peer, reduce_op)` -> work, `abort()`, `shutdown()`.
class ProcessGroupBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Started = c10::intrusive_ptr<c10d::Work>;

  ProcessGroupBackend(int rank, int size, pybind11::object communicator)
      : Backend(rank, size), communicator_(shared(std::move(communicator))) {}

  const std::string getBackendName() const override {
    return "standin";
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    pybind11::gil_scoped_acquire gil;
    communicator_->attr("set_timeout")(timeout.count() / 1000.0);
  }
  void abort() override {
    pybind11::gil_scoped_acquire gil;
    communicator_->attr("abort")();
  }
  void shutdown() override {
    pybind11::gil_scoped_acquire gil;
    communicator_->attr("shutdown")();
  }

  Started send(Tensors& tensors, int peer, int) override {
    return start("send", c10d::OpType::SEND, tensors, {}, peer);
  }
  Started recv(Tensors& tensors, int peer, int) override {
    return start("recv", c10d::OpType::RECV, {}, tensors, peer);
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return start("all_reduce", c10d::OpType::ALLREDUCE, tensors, tensors, -1, options.reduceOp);
  }
  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    bool is_root = options.rootRank == getRank();
    return start("broadcast", c10d::OpType::BROADCAST, is_root ? tensors : Tensors(), is_root ? Tensors() : tensors,
                 options.rootRank);
  }
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return start("reduce", c10d::OpType::REDUCE, tensors, options.rootRank == getRank() ? tensors : Tensors(),
                 options.rootRank, options.reduceOp);
  }
  Started allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return start("all_gather", c10d::OpType::ALLGATHER, inputs, outputs.at(0), -1);
  }
  Started _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return start("all_gather_into_tensor", c10d::OpType::_ALLGATHER_BASE, {input}, {output}, -1);
  }
  Started _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return start("reduce_scatter_tensor", c10d::OpType::_REDUCE_SCATTER_BASE, {input}, {output}, -1, options.reduceOp);
  }
  Started barrier(const c10d::BarrierOptions&) override {
    return start("barrier", c10d::OpType::BARRIER, {}, {}, -1);
  }

 private:
  Started start(const char* op, c10d::OpType type, const Tensors& inputs, const Tensors& outputs, int64_t peer,
                c10d::ReduceOp reduce = c10d::ReduceOp::SUM) {
    pybind11::gil_scoped_acquire gil;
    auto work = communicator_->attr("start")(op, inputs, outputs, peer, reduce);
    return c10::make_intrusive<PythonWork>(getRank(), type, std::move(work), outputs.empty() ? inputs : outputs);
  }

  std::shared_ptr<pybind11::object> communicator_;
};

} // namespace pretend
