// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/capture/op_trace.h"

#include <memory>
#include <mutex>
#include <vector>

namespace megagraph {
namespace {

std::mutex last_op_mutex;
std::string last_op_path;
thread_local std::vector<std::string> open_ops;

std::unique_ptr<at::ObserverContext> op_started(const at::RecordFunction& fn) {
  open_ops.emplace_back(fn.name());
  std::string path;
  for (const std::string& op : open_ops) path += (path.empty() ? "" : " > ") + op;
  const std::lock_guard<std::mutex> lock(last_op_mutex);
  last_op_path = std::move(path);
  return nullptr;
}

void op_ended(const at::RecordFunction&, at::ObserverContext*) {
  if (!open_ops.empty()) open_ops.pop_back();
}

}  // namespace

OpTrace::OpTrace()
    : handle_(at::addGlobalCallback(
          at::RecordFunctionCallback(&op_started, &op_ended)
              .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}))) {
  const std::lock_guard<std::mutex> lock(last_op_mutex);
  last_op_path.clear();
  open_ops.clear();
}

OpTrace::~OpTrace() { at::removeCallback(handle_); }

std::string OpTrace::last_op() const {
  const std::lock_guard<std::mutex> lock(last_op_mutex);
  return last_op_path;
}

}  // namespace megagraph
