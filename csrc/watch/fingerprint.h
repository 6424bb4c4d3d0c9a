// SPDX-License-Identifier: Apache-2.0
// Hashes of what a capture depends on and that may change between steps.
//
// Note [Module fingerprint]
// Parameters may move, be replaced or frozen, submodules come and go, hooks be registered.
// To look for each of these in Python is a walk over everything, before every step. The
// fingerprint is one call, and as long as it stays, nobody needs to look more closely. It covers,
// for each module: which submodules and parameters it has, the keys of its hooks and of those on
// all modules, the addresses of its buffers; for each parameter: address, requires_grad, hooks of
// the tensor and of its gradient accumulator, main_grad and that one's address. Memory that was
// freed counts as no address.
//
// Most of it stands in dictionaries of Python, and is read again only where one of them has
// changed (csrc/watch/dict_events.h). What lies behind a tensor tells nobody when it changes, and
// is read each time.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace megagraph {

// Of where the tensors lie, and of which of them require a gradient.
std::pair<size_t, size_t> fingerprint(const std::vector<at::Tensor>& tensors);

// Some modules, of which it holds none. Needs the GIL.
class ModuleWatch {
 public:
  // `modules` are weak references; one that is dead counts as such.
  explicit ModuleWatch(pybind11::list modules) : modules_(std::move(modules)) {}

  // Note [Module fingerprint].
  size_t fingerprint();
  // Whether a parameter with main_grad held a gradient besides at the last fingerprint, of which
  // that is no part.
  bool have_other_grads() const { return have_other_grads_; }

 private:
  class Reader;
  void look();

  const pybind11::list modules_;
  std::optional<uint64_t> seen_;  // how many events there were when the dictionaries were read
  size_t structure_ = 0;
  // Borrowed: as long as no dictionary changes, they are in theirs.
  std::vector<PyObject*> params_, others_;
  std::vector<bool> have_main_grad_;  // of the parameters
  bool have_other_grads_ = false;
  std::vector<pybind11::object> computed_;  // in no dictionary: read again each time
};

}  // namespace megagraph
