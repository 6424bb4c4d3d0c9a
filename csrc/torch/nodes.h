// SPDX-License-Identifier: Apache-2.0
// Autograd nodes of ours: who owns them, and what the running backward wants of them.
//
// Releases differ: up to torch 2.12 nodes belong to std::shared_ptr, with a deleter that unwinds
// long chains without recursion. Since 2.13 a node counts its own references, and unwinds so by
// itself; where a weak reference is left, it is told so and destroyed later. Node::getptr(),
// set_history() and the edges take either.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include "csrc/torch/version.h"
#if MEGAGRAPH_TORCH_SINCE(2, 13)
#include <c10/util/intrusive_ptr.h>
#else
#include <memory>
#endif

namespace megagraph {

#if MEGAGRAPH_TORCH_SINCE(2, 13)

template <typename T>
using NodePtr = c10::intrusive_ptr<T>;

// Takes over a node that was just made with `new`.
template <typename T>
NodePtr<T> own_node(T* node) {
  return NodePtr<T>::unsafe_steal_from_new(node);
}

#else

template <typename T>
using NodePtr = std::shared_ptr<T>;

// Takes over a node that was just made with `new`.
template <typename T>
NodePtr<T> own_node(T* node) {
  return NodePtr<T>(node, torch::autograd::deleteNode);
}

#endif

// A node that has something to give back when nobody can run it any more. Whoever derives from it
// calls let_go() in the destructor too.
class LendingNode : public torch::autograd::Node {
#if MEGAGRAPH_TORCH_SINCE(2, 13)
 public:
  void release_resources() override {
    let_go();
    Node::release_resources();
  }
#endif

 protected:
  // On any thread, with or without the GIL; perhaps twice.
  virtual void let_go() noexcept = 0;
};

// Whether the backward that runs on this thread computes named gradients only, as
// torch.autograd.grad() does, instead of accumulating all of them.
inline bool is_partial_backward() {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  return wanted != nullptr && !wanted->empty();
}

// The number of the backward that runs on this thread, which no other one has; -1 for none.
inline int backward_number() { return torch::autograd::get_current_graph_task_id(); }
inline bool is_in_backward() { return backward_number() != -1; }

}  // namespace megagraph
