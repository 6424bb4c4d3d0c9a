// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/capture/read_trace.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "csrc/torch/nodes.h"
#include "csrc/torch/storages.h"
#include "csrc/torch/version_counter.h"

namespace megagraph {
namespace {

// Autograd's threads are told, too. What is asked of a tensor may run ops.
std::recursive_mutex active_mutex;
ReadTrace* active = nullptr;

// A tensor of a compiler's, whose size nobody knows, has none.
bool has_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() &&
         tensor.storage().sym_nbytes().maybe_as_int().value_or(0) > 0;
}

// Whether it is no stand-in for another tensor, as compilers and subclasses have.
bool is_real(const at::Tensor& tensor) {
  return has_memory(tensor) && !tensor.is_meta() &&
         !tensor.key_set().has_any(
             c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
}

const void* place_of(const at::Tensor& tensor) {
  return has_memory(tensor) ? tensor.const_data_ptr() : nullptr;
}

// The memory that an op was given.
struct Given : at::ObserverContext {
  std::unordered_set<const c10::StorageImpl*> memory;
};

// From its first byte to the one behind its last.
std::pair<const char*, const char*> range_of(const at::Tensor& tensor) {
  const auto* first = static_cast<const char*>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {first, first + (last + 1) * static_cast<int64_t>(tensor.itemsize())};
}

bool overlap(const at::Tensor& one, const at::Tensor& other) {
  if (!one.is_alias_of(other) || one.numel() == 0 || other.numel() == 0) return false;
  if (one.layout() != at::kStrided || other.layout() != at::kStrided) return true;
  const auto [first, end] = range_of(one);
  const auto [first_of_other, end_of_other] = range_of(other);
  return first < end_of_other && first_of_other < end;
}

// Whether an op writes what it is given at a place. An autograd function has no schema.
bool is_write(const std::optional<c10::FunctionSchema>& schema, size_t place) {
  if (!schema || place >= schema->arguments().size()) return false;
  const c10::AliasInfo* alias = schema->arguments()[place].alias_info();
  return alias != nullptr && alias->isWrite();
}

template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) for_each_tensor(item, visit);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) for_each_tensor(item, visit);
  }
}

}  // namespace

std::unique_ptr<at::ObserverContext> ReadTrace::op_started(const at::RecordFunction& op) {
  const std::string name = op.name();
  const bool is_recorded = at::GradMode::is_enabled() && name != "aten::detach" && name != "detach";
  auto given = std::make_unique<Given>();
  const std::lock_guard<std::recursive_mutex> lock(active_mutex);
  const auto inputs = op.inputs();
  const auto schema = op.operator_schema();
  for (size_t i = 0; i < inputs.size(); ++i) {
    for_each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      if (active != nullptr) active->note(tensor, is_recorded);
      if (active != nullptr && is_write(schema, i)) active->note_write(tensor);
      if (has_memory(tensor)) given->memory.insert(tensor.storage().unsafeGetStorageImpl());
    });
  }
  return given;
}

void ReadTrace::op_ended(const at::RecordFunction& op, at::ObserverContext* context) {
  const auto& given = static_cast<const Given*>(context)->memory;
  const std::lock_guard<std::recursive_mutex> lock(active_mutex);
  for (const c10::IValue& output : op.outputs()) {
    for_each_tensor(output, [&](const at::Tensor& tensor) {
      if (active == nullptr || !has_memory(tensor)) return;
      c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
      // Ops inside of it, as hooks of saved tensors run, may have been given the output before.
      if (given.count(storage) == 0) {
        active->memory_.insert_or_assign(storage,
                                         Memory{tensor.storage().getWeakStorageImpl(), true});
      }
    });
  }
}

void ReadTrace::begin(const at::Tensor& given, std::vector<at::Tensor> params) {
  const std::lock_guard<std::recursive_mutex> lock(active_mutex);
  TORCH_CHECK(active == nullptr, "another thread warms layers up at the same time");
  active = this;
  params_ = std::move(params);
  thread_ = std::this_thread::get_id();
  first_node_ = at::sequence_number::peek();
  meet(given, true);
  // Both are told in the backward passes of this thread's calls as well, whoever runs them.
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&op_started, &op_ended)
                                           .needsInputs(true)
                                           .needsOutputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
}

void ReadTrace::end() {
  if (!handle_) return;
  at::removeCallback(*std::exchange(handle_, std::nullopt));
  const std::lock_guard<std::recursive_mutex> lock(active_mutex);
  active = nullptr;
  for (Read& read : reads_) {
    const auto tensor = read.tensor.lock();
    if (!tensor) continue;
    if (read.grad) at::Tensor(tensor).mutable_grad() = *std::exchange(read.grad, std::nullopt);
    before_.push_back(std::move(read));
  }
  reads_.clear();
  known_.clear();
  for (const auto& [param, before] : written_) copy_unnoticed(param.detach(), before);
  written_.clear();
  params_.clear();
  for (auto it = memory_.begin(); it != memory_.end();) {
    it = it->second.storage.expired() ? memory_.erase(it) : std::next(it);
  }
}

// Whether an op that was watched has made its memory; `is_made` says so where it is new.
bool ReadTrace::meet(const at::Tensor& tensor, bool is_made) {
  if (!has_memory(tensor)) return true;
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const auto found =
      memory_.try_emplace(storage, Memory{tensor.storage().getWeakStorageImpl(), is_made});
  return found.first->second.is_made;
}

// Of one that requires a gradient. What was computed meanwhile may lie in memory that no op made.
bool ReadTrace::is_from_before(const at::Tensor& tensor) const {
  return tensor.is_leaf() ||
         (std::this_thread::get_id() == thread_ && tensor.grad_fn()->sequence_nr() < first_node_);
}

// `is_recorded`: as autograd would, so that a gradient comes.
void ReadTrace::note(const at::Tensor& tensor, bool is_recorded) {
  if (!has_memory(tensor)) return;
  const auto [found, is_new] = known_.try_emplace(tensor.unsafeGetTensorImpl(), reads_.size());
  // A leaf that the call makes requires a gradient only once ops have filled it.
  if (is_new) reads_.push_back({WeakTensor(tensor.getIntrusivePtr()), tensor.requires_grad()});
  const bool is_made = meet(tensor, false);
  Read& read = reads_[found->second];
  if (read.loses_gradient || is_made || !is_recorded || !read.required_gradient) return;
  read.loses_gradient = is_from_before(tensor);
  if (read.loses_gradient && tensor.is_leaf()) {
    read.grad = std::exchange(tensor.mutable_grad(), at::Tensor());
  }
}

// Before the op does.
void ReadTrace::note_write(const at::Tensor& tensor) {
  if (!has_memory(tensor)) return;
  for (at::Tensor& param : params_) {
    if (!param.defined() || !has_memory(param) || !overlap(param, tensor)) continue;
    const at::DisableRecordFunctionGuard unseen;
    const at::NoGradGuard no_grad;
    written_.push_back({param, param.detach().clone()});
    param = at::Tensor();  // once is enough
  }
}

at::Tensor ReadTrace::written() const {
  const std::lock_guard<std::recursive_mutex> lock(active_mutex);
  return written_.empty() ? at::Tensor() : written_.front().param;
}

at::Tensor ReadTrace::trainable(const std::vector<at::Tensor>& known) {
  const std::lock_guard<std::recursive_mutex> lock(active_mutex);
  for (const Read& read : reads_) {
    const auto held = read.tensor.lock();
    if (!held || !read.loses_gradient) continue;
    at::Tensor tensor(held);
    const auto is_same = [&](const at::Tensor& it) { return it.is_same(tensor); };
    if (std::none_of(known.begin(), known.end(), is_same)) return tensor;
  }
  return {};
}

std::string ReadTrace::number_of(const at::Tensor& tensor) const {
  if (device_.is_cpu() || !may_be_numbers(tensor)) return {};
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

void ReadTrace::keep(const std::vector<at::Tensor>& known) {
  const std::lock_guard<std::recursive_mutex> lock(active_mutex);
  std::unordered_set<const void*> elsewhere;
  for (const at::Tensor& it : known) {
    if (has_memory(it)) elsewhere.insert(it.storage().data());
  }
  std::unordered_set<c10::TensorImpl*> met;
  for (Read& read : before_) {
    const auto held = read.tensor.lock();
    if (!held || !met.insert(held.get()).second) continue;
    const at::Tensor tensor(held);
    if (!is_real(tensor) || elsewhere.count(tensor.storage().data()) > 0) continue;
    kept_.push_back({tensor.storage(), std::move(read.tensor), place_of(tensor), number_of(tensor),
                     !meet(tensor, true)});
  }
  before_.clear();
  memory_.clear();
}

bool ReadTrace::has_moved() const {
  return std::any_of(kept_.begin(), kept_.end(), [this](const Kept& kept) {
    if (!kept.is_compared) return false;
    const auto held = kept.tensor.lock();
    if (!held) return true;
    const at::Tensor tensor(held);
    return place_of(tensor) != kept.place || number_of(tensor) != kept.number;
  });
}

}  // namespace megagraph
