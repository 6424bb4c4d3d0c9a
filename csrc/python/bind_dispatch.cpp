// SPDX-License-Identifier: Apache-2.0
// What decides on micro-batches: megagraph/_C.pyi is its manual.
#include "csrc/python/bindings.h"
#include "csrc/python/dispatcher.h"
#include "csrc/python/eager_reasons.h"

namespace py = pybind11;

namespace megagraph {

void bind_dispatch(py::module_& m) {
  py::class_<States>(m, "States")
      .def(py::init<int, bool>(), py::arg("size"), py::kw_only(), py::arg("run_alike") = true)
      .def("local_state", &States::local_state, py::arg("rank"), py::arg("fingerprint"),
           py::arg("settings"))
      .def("agree", &States::agree, py::arg("largest"))
      .def_property_readonly("current", &States::current)
      .def_property_readonly("is_new", &States::is_new)
      .def("has_many", &States::has_many)
      .def("forget_oldest", &States::forget_oldest, py::arg("keep"))
      .def("add_name", &States::add_name, py::arg("fingerprint"))
      .def("of_call", &States::of_call, py::arg("fingerprint"))
      .def("under", &States::under, py::arg("settings"))
      .def("oldest_first", &States::oldest_first)
      .def("eager_reason", &States::eager_reason, py::arg("number"), py::arg("captured"));
  py::class_<DueVariants>(m, "DueVariants")
      .def(py::init<int>(), py::arg("warm_up_steps"))
      .def("note", &DueVariants::note, py::arg("kind"))
      .def("end_step", &DueVariants::end_step)
      .def("due_in", &DueVariants::due_in, py::arg("state"))
      .def("mark_captured", &DueVariants::mark_captured, py::arg("kinds"))
      .def("forget_graphs", &DueVariants::forget_graphs, py::kw_only(),
           py::arg("only_training") = false)
      .def("forget_states", &DueVariants::forget_states, py::arg("states"))
      .def_property_readonly("warmed_up", &DueVariants::warmed_up)
      .def_property_readonly("due", &DueVariants::due)
      .def_property_readonly("captured", &DueVariants::captured)
      .def("states_with_graphs", &DueVariants::states_with_graphs);
  py::class_<Dispatcher>(m, "Dispatcher")
      .def(py::init([](py::object make_variant, int64_t extra_seqs, bool depends_on_longest,
                       bool cuts_tables, bool needs_equal_rows, bool is_eager, int64_t cp_size,
                       int ranks, bool run_alike, int warm_up_steps) {
             const DispatchOptions options{
                 extra_seqs, depends_on_longest, cuts_tables,  needs_equal_rows, is_eager, cp_size,
                 ranks,      run_alike,          warm_up_steps};
             return std::make_unique<Dispatcher>(options, std::move(make_variant));
           }),
           py::arg("make_variant"), py::kw_only(), py::arg("extra_seqs") = 0,
           py::arg("depends_on_longest") = false, py::arg("cuts_tables") = false,
           py::arg("needs_equal_rows") = false, py::arg("is_eager") = false, py::arg("cp_size") = 1,
           py::arg("ranks") = 1, py::arg("run_alike") = true, py::arg("warm_up_steps") = 1)
      .def("set_capacities", &Dispatcher::set_capacities, py::arg("by_cp_size"))
      .def("set_groups", &Dispatcher::set_groups, py::arg("by_cp_size"))
      .def("use", &Dispatcher::use, py::arg("bank"), py::arg("variants"), py::arg("eager_variants"),
           py::arg("watch"))
      .def("refuse", &Dispatcher::refuse, py::arg("reason"))
      .def("keep_eager", &Dispatcher::keep_eager, py::arg("reason"), py::arg("gradients_reason"))
      .def("set_suspended", &Dispatcher::set_suspended, py::arg("is_suspended"))
      .def_property_readonly("observed", &Dispatcher::observed)
      .def_property_readonly("states", &Dispatcher::states,
                             py::return_value_policy::reference_internal)
      .def_property_readonly("due", &Dispatcher::due, py::return_value_policy::reference_internal)
      .def("eager_reason", &Dispatcher::eager_reason, py::arg("params"), py::arg("tokens"))
      .def("enter", &Dispatcher::enter, py::arg("params"), py::arg("tokens"), py::arg("has_mask"),
           py::arg("can_stage"), py::arg("is_skipped"), py::arg("is_settled"))
      .def("begin", &Dispatcher::begin, py::arg("key"), py::arg("sources"))
      .def("end", &Dispatcher::end)
      .def("explain", &Dispatcher::explain, py::arg("key"), py::arg("reason"))
      .def("count", &Dispatcher::count, py::arg("key"), py::arg("reason"))
      .def("counts", &Dispatcher::counts);
}

}  // namespace megagraph
