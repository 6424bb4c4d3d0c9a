// SPDX-License-Identifier: Apache-2.0
// What watches modules: megagraph/_C.pyi is its manual.
#include "csrc/python/bindings.h"
#include "csrc/watch/fingerprint.h"
#include "csrc/watch/state_watch.h"
#include "csrc/torch/accumulator_hooks.h"
#include "csrc/torch/numerics.h"

namespace py = pybind11;

namespace megagraph {

void bind_watch(py::module_& m) {
  m.def("count_accumulator_hooks", &count_accumulator_hooks, py::arg("param"));
  m.def("fingerprint", &fingerprint, py::arg("tensors"));
  m.def(
      "numeric_settings",
      [](const at::Device& device) { return NumericSettings::current(device.type()).hash(); },
      py::arg("device"));
  py::class_<ModuleWatch>(m, "ModuleWatch")
      .def(py::init<py::list>(), py::arg("modules"))
      .def("fingerprint", &ModuleWatch::fingerprint)
      .def_property_readonly("have_other_grads", &ModuleWatch::have_other_grads);
  py::class_<StateWatch>(m, "StateWatch")
      .def(py::init<py::list, py::object, py::iterable, py::object, py::list>(), py::arg("modules"),
           py::arg("block"), py::arg("left_out"), py::arg("is_expected_hook"), py::arg("keys"))
      .def("now", &StateWatch::now, py::arg("whole"))
      .def("items", &StateWatch::items);
}

}  // namespace megagraph
