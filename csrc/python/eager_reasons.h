// SPDX-License-Identifier: Apache-2.0
// An EagerReason is Python's member of that name, and back.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "csrc/decide/eager_reason.h"
#include "csrc/torch/made_once.h"

namespace megagraph {

inline pybind11::object python_reason(EagerReason reason) {
  const pybind11::object& members = made_once([] {
    const auto reasons = pybind11::module_::import("megagraph.reasons");
    return pybind11::object(pybind11::tuple(reasons.attr("EagerReason")));
  });
  return members[pybind11::int_(static_cast<size_t>(reason))];
}

inline pybind11::object python_reason(std::optional<EagerReason> reason) {
  return reason ? python_reason(*reason) : pybind11::none();
}

}  // namespace megagraph

namespace pybind11::detail {

template <>
struct type_caster<megagraph::EagerReason> {
  PYBIND11_TYPE_CASTER(megagraph::EagerReason, const_name("EagerReason"));

  bool load(handle source, bool) {
    if (!PyLong_Check(source.ptr())) return false;
    const long number = PyLong_AsLong(source.ptr());
    if (number < 0 || number >= static_cast<long>(megagraph::kEagerReasonNames.size())) {
      PyErr_Clear();
      return false;
    }
    value = static_cast<megagraph::EagerReason>(number);
    return true;
  }
  static handle cast(megagraph::EagerReason reason, return_value_policy, handle) {
    return megagraph::python_reason(reason).release();
  }
};

}  // namespace pybind11::detail
