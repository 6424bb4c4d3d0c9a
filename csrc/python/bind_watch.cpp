// SPDX-License-Identifier: Apache-2.0
// What watches modules: megagraph/_C.pyi is its manual.
#include "csrc/python/bindings.h"
#include "csrc/python/eager_reasons.h"
#include "csrc/watch/module_watch.h"
#include "csrc/watch/state_items.h"
#include "csrc/watch/state_watch.h"
#include "csrc/torch/accumulators.h"
#include "csrc/torch/numerics.h"

namespace py = pybind11;

namespace megagraph {

void bind_watch(py::module_& m) {
  m.def("count_accumulator_hooks", &count_accumulator_hooks, py::arg("param"));
  m.def("foreign_hook", &foreign_hook, py::arg("module"), py::arg("is_expected_hook"));
  m.def(
      "numeric_settings",
      [](const at::Device& device) { return NumericSettings::current(device.type()).hash(); },
      py::arg("device"));
  py::class_<StateWatch, std::shared_ptr<StateWatch>>(m, "StateWatch")
      .def(py::init<py::list, py::object, py::iterable, py::object, at::Device>(),
           py::arg("modules"), py::arg("block"), py::arg("left_out"), py::arg("is_expected_hook"),
           py::arg("device") = at::Device(at::kCPU))
      .def("set_keys", &StateWatch::set_keys, py::arg("keys"))
      .def("now", &StateWatch::now, py::arg("whole"))
      .def("items", &StateWatch::items);
  py::class_<ModuleWatch, std::shared_ptr<ModuleWatch>>(m, "ModuleWatch")
      .def(py::init<py::object, py::object>(), py::arg("find_modules"), py::arg("find_state"))
      .def("follow", &ModuleWatch::follow)
      .def("follow_anew", &ModuleWatch::follow_anew)
      .def("expect_hooks", &ModuleWatch::expect_hooks)
      .def("expect_memory", &ModuleWatch::expect_memory, py::kw_only(), py::arg("grad"))
      .def("forget_gradients", &ModuleWatch::forget_gradients)
      .def("is_as_expected", &ModuleWatch::is_as_expected)
      .def("difference", &ModuleWatch::difference, py::arg("of_hooks"))
      .def("set_state", &ModuleWatch::set_state, py::arg("state"))
      .def("state", &ModuleWatch::state, py::arg("whole"))
      .def("has_memory", &ModuleWatch::has_memory, py::kw_only(), py::arg("grad"))
      .def_property_readonly("is_watching", &ModuleWatch::is_watching)
      .def_property_readonly("are_gradients_away", &ModuleWatch::are_gradients_away)
      .def_property_readonly("have_only_gradients_moved", &ModuleWatch::have_only_gradients_moved)
      .def_property_readonly("have_other_grads", &ModuleWatch::have_other_grads);
}

}  // namespace megagraph
