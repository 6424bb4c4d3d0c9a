// SPDX-License-Identifier: Apache-2.0
// Tensors as Python objects, without a caster in between: they are on the way of every replay.
//
// No release from 2.11 to 2.15 differs. The hooks are fields of the object that no function
// returns.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <utility>

#include "csrc/torch/made_once.h"

namespace megagraph {

// By type alone: torch's own check goes through the metaclass, several times as long.
inline bool is_tensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

// Whether a tensor has no class of its own, which may answer torch's functions itself.
inline bool is_plain_tensor(PyObject* tensor) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  if (type == THPVariableClass) return true;
  const pybind11::object& parameter = made_once(
      [] { return pybind11::object(pybind11::module_::import("torch.nn").attr("Parameter")); });
  return type == parameter.ptr();
}

// Of an object that is_tensor().
inline const at::Tensor& tensor_of(PyObject* object) { return THPVariable_Unpack(object); }

// What `Tensor::requires_grad()` answers, whose call through a table costs more than the answer. A
// view may have it of its base.
inline bool requires_grad(PyObject* tensor) {
  const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(
      tensor_of(tensor).unsafeGetTensorImpl()->autograd_meta());
  if (meta == nullptr) return false;
  return meta->is_view_ ? meta->requires_grad() : meta->requires_grad_ || meta->grad_fn_ != nullptr;
}

// A new reference; null with a Python error set.
inline PyObject* to_python(at::Tensor&& tensor) { return THPVariable_Wrap(std::move(tensor)); }

// The tables of hooks on the tensor itself: those of its gradient, those after its accumulation.
// Borrowed; null or None where nothing was registered.
inline std::array<PyObject*, 2> tensor_hook_tables(PyObject* tensor) {
  const auto* variable = reinterpret_cast<const THPVariable*>(tensor);
  return {variable->backward_hooks, variable->post_accumulate_grad_hooks};
}

}  // namespace megagraph
