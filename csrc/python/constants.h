// SPDX-License-Identifier: Apache-2.0
// Arguments of layers that a variant's graphs were captured with, or that are staged, by name, and
// whether a call has the same.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace megagraph {

// Whether two answers are the same: a table, one and YaRN's scale, or two. Waits for the device.
bool are_equal(const pybind11::handle& one, const pybind11::handle& other);

class Constants {
 public:
  // None is left out.
  explicit Constants(const pybind11::dict& values);

  const pybind11::dict& values() const { return values_; }
  // Of what is staged: takes that of the micro-batch.
  void set(const pybind11::str& name, const pybind11::object& value);
  // Whether a call has just these arguments; None is as good as none.
  bool are(const pybind11::dict& arguments);
  // Whether what a call has is among them.
  bool hold(const pybind11::dict& arguments);
  // Whether an argument that is another object equals the one of the capture. Megatron keeps 32
  // rotary tables, over all models, and makes one that it dropped anew: an equal tensor is compared
  // once, which waits for the device, and known until one of the two is written. A constant that
  // has been written since is none any more: graphs read what was made of it.
  bool is_equal(const pybind11::handle& name, const pybind11::handle& value);

 private:
  // How often a tensor had been written by then, and where it lay.
  using Mark = std::optional<std::array<int64_t, 2>>;
  struct Equal {
    at::Tensor tensor;  // the last one that equalled a constant
    std::array<Mark, 2> marks;
  };

  static Mark mark_of(const at::Tensor& tensor);
  bool has(const pybind11::handle& name, const pybind11::handle& value);
  bool is_written(const pybind11::handle& name, PyObject* constant) const;

  pybind11::dict values_;
  std::map<std::string, Mark> marks_;   // of tensors, by name, as they were taken
  std::map<std::string, Equal> equal_;  // by name
};

}  // namespace megagraph
