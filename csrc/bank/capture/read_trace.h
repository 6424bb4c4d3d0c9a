// SPDX-License-Identifier: Apache-2.0
// Finds what calls read that they were not given: parameters that go without their gradient, and
// memory that a graph has to keep alive. And which of their own parameters they write.
//
// Note [Tensors of nobody's]
// A forward may reach a tensor through a closure, a list, a global or another module. No list of
// owners has it, so ops are watched while a site is warmed up: torch tells its observers what each
// op and each autograd function was given. Unlike a dispatch mode an observer stands outside of
// dispatch: compiled code stays compiled, and no kernel or bit is another one.
//
// A tensor is one of nobody's if no op of the warm-up has made its memory: a leaf that a forward
// makes is none. If autograd has a gradient for it, that would be lost: the site is refused. A
// re-entrant checkpoint shows it in the backward alone, and the gradient is taken away again. Any
// other tensor is kept, once the graphs are there: its memory, and where it lay, since
// where somebody has dropped or moved it, eager reads something else. Kept as well, but not
// compared, is what the warm-up itself has made and somebody still holds, as caches do. On the CPU
// beside graphs on a GPU, a tensor without dimensions is part of a kernel's arguments: its bytes
// are compared.
//
// A parameter that a forward writes would be written once more by each run of a capture: the site
// is refused, and the parameter is put back, of which a copy is made before the first such op.
//
// Not seen are tensors that no op and no autograd function is given: those that code beside torch's
// dispatcher (pybind kernels, Triton, what a compiler made) takes out of a closure by itself. Nor
// is another thread than that of the call and those of its backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace megagraph {

class ReadTrace {
 public:
  // `device`: that of the graphs.
  explicit ReadTrace(at::Device device) : device_(device) {}
  ~ReadTrace() { end(); }
  ReadTrace(const ReadTrace&) = delete;
  ReadTrace& operator=(const ReadTrace&) = delete;

  // Watches the ops of a call that is given a tensor and has parameters. One trace at a time, of
  // any thread.
  void begin(const at::Tensor& given, std::vector<at::Tensor> params);
  // Puts back gradients that leaves of nobody's had before the call, and what it has written of its
  // parameters.
  void end();
  // The first of its parameters that the call has written so far; undefined if there is none.
  at::Tensor written() const;
  // The first tensor of nobody's, among those that the call has read so far and that are still
  // there, which requires a gradient; undefined if there is none. `known` have an owner.
  at::Tensor trainable(const std::vector<at::Tensor>& known);

  // After the calls: keeps what was read, lies elsewhere than `known`, and is still there.
  void keep(const std::vector<at::Tensor>& known);
  // Whether some of it was dropped, or lies elsewhere by now.
  bool has_moved() const;
  size_t size() const { return kept_.size(); }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  // Of memory, by its address: held weakly, nobody else gets that address.
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    bool is_made;  // by an op that was watched
  };
  struct Read {
    WeakTensor tensor;
    bool required_gradient;  // when it was first read
    bool loses_gradient = false;
    std::optional<at::Tensor> grad{};  // taken from such a leaf for the time of the call
  };
  struct Written {
    at::Tensor param, before;
  };
  struct Kept {
    c10::Storage storage;
    WeakTensor tensor;
    const void* place;
    std::string number;  // the bytes of one that is part of a kernel's arguments
    bool is_compared;
  };

  static std::unique_ptr<at::ObserverContext> op_started(const at::RecordFunction& op);
  static void op_ended(const at::RecordFunction& op, at::ObserverContext* context);
  bool meet(const at::Tensor& tensor, bool is_made);
  bool is_from_before(const at::Tensor& tensor) const;
  void note(const at::Tensor& tensor, bool is_recorded);
  void note_write(const at::Tensor& tensor);
  std::string number_of(const at::Tensor& tensor) const;

  const at::Device device_;
  std::optional<at::CallbackHandle> handle_;
  std::thread::id thread_;
  uint64_t first_node_ = 0;  // of this call, as the thread counts autograd's
  std::unordered_map<c10::StorageImpl*, Memory> memory_;
  std::vector<Read> reads_, before_;                    // of this call, of earlier ones
  std::unordered_map<c10::TensorImpl*, size_t> known_;  // places in `reads_`
  std::vector<at::Tensor> params_;                      // of this call
  std::vector<Written> written_;
  std::vector<Kept> kept_;
};

}  // namespace megagraph
