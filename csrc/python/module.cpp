// SPDX-License-Identifier: Apache-2.0
// The compiled module.

#include <string>
#include <vector>

#include "csrc/decide/eager_reason.h"
#include "csrc/python/bindings.h"
#include "csrc/python/site_object.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using megagraph::kEagerReasonNames;
  m.attr("EAGER_REASON_NAMES") =
      std::vector<std::string>(kEagerReasonNames.begin(), kEagerReasonNames.end());
  PyObject* site = megagraph::make_site_type();
  if (site == nullptr) throw py::error_already_set();
  m.attr("Site") = py::reinterpret_steal<py::object>(site);
  megagraph::bind_capture(m);
  megagraph::bind_packs(m);
  megagraph::bind_replay(m);
  megagraph::bind_verify(m);
  megagraph::bind_watch(m);
  megagraph::bind_dispatch(m);  // of the classes before
}
