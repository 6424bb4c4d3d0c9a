// SPDX-License-Identifier: Apache-2.0
// What reads packs and decides on them: megagraph/_C.pyi is its manual.
#include "csrc/python/bindings.h"
#include "csrc/python/decider.h"
#include "csrc/python/pack_reader.h"

namespace py = pybind11;

namespace megagraph {

void bind_packs(py::module_& m) {
  m.def(
      "pack_shape",
      [](const py::object& params, int64_t tokens, int64_t extra_seqs,
         int64_t cp_size) -> py::object {
        const auto found = pack_shape(params, tokens, extra_seqs, cp_size);
        if (!found) return py::none();
        return py::make_tuple(found->tokens, found->num_seqs, found->max_seqlen, found->cp_size);
      },
      py::arg("params"), py::arg("tokens"), py::arg("extra_seqs"), py::arg("cp_size"));
  m.def(
      "pack_form",
      [](const py::object& params) -> py::object {
        const auto found = pack_form(params);
        if (!found) return py::none();
        return py::make_tuple(found->has_padded, found->is_aliased, found->pad_between_seqs,
                              found->has_seq_idx);
      },
      py::arg("params"));
  py::class_<Decider>(m, "Decider")
      .def(py::init<int64_t, bool, bool, py::list, py::object, py::object>(), py::arg("extra_seqs"),
           py::arg("depend_on_longest"), py::arg("are_cut"), py::arg("reasons"),
           py::arg("make_key"), py::arg("state_of_call"))
      .def("set_capacities", &Decider::set_capacities, py::arg("by_cp_size"))
      .def("refuse", &Decider::refuse, py::arg("reason"))
      .def("why_not", &Decider::why_not, py::arg("params"), py::arg("tokens"),
           py::arg("cp_size") = 1)
      .def("decide", &Decider::decide, py::arg("params"), py::arg("tokens"), py::arg("has_mask"),
           py::arg("cp_size") = 1);
}

}  // namespace megagraph
