// SPDX-License-Identifier: Apache-2.0
// What reads packs: megagraph/_C.pyi is its manual.
#include "csrc/python/bindings.h"
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
  py::class_<GivenPack>(m, "GivenPack")
      .def_readonly("params", &GivenPack::params)
      .def_readonly("form", &GivenPack::form)
      .def_readonly("capacity", &GivenPack::capacity)
      .def_property_readonly("tokens", [](const GivenPack& pack) { return pack.shape.tokens; })
      .def_property_readonly("num_seqs", [](const GivenPack& pack) { return pack.shape.num_seqs; })
      .def_property_readonly("max_seqlen",
                             [](const GivenPack& pack) { return pack.shape.max_seqlen; })
      .def("declares_every_row", [](const GivenPack& pack) {
        const PackShape& shape = pack.shape;
        return shape.max_seqlen == shape.tokens && declares_every_row(pack.params, shape.tokens);
      });
  py::class_<PackReader>(m, "PackReader")
      .def(py::init<int64_t, py::list, py::object>(), py::arg("extra_seqs"), py::arg("reasons"),
           py::arg("make_form"))
      .def("set_capacities", &PackReader::set_capacities, py::arg("by_cp_size"))
      .def("refuse", &PackReader::refuse, py::arg("reason"))
      .def("read", &PackReader::read, py::arg("params"), py::arg("tokens"), py::arg("cp_size") = 1);
}

}  // namespace megagraph
