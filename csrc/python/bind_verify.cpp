// SPDX-License-Identifier: Apache-2.0
// How bits are compared, and what calls leave is kept and put back.
#include <set>
#include <string>

#include "csrc/bank/verify/comparison.h"
#include "csrc/bank/verify/kept_state.h"
#include "csrc/bank/verify/runs.h"
#include "csrc/python/bindings.h"
#include "csrc/torch/python_tensors.h"
#include "csrc/watch/plain_attributes.h"

namespace py = pybind11;

namespace megagraph {
namespace {

NamedTensors named(const py::dict& tensors) {
  NamedTensors found;
  for (const auto& [name, tensor] : tensors) {
    found.emplace_back(name.cast<std::string>(), tensor.cast<at::Tensor>());
  }
  return found;
}

py::dict in_python(const NamedTensors& tensors) {
  py::dict found;
  for (const auto& [name, tensor] : tensors) found[py::str(name)] = tensor;
  return found;
}

// Whether a call may change a tensor in place: a plain one, whose entries share no memory.
bool is_writable(const py::handle& object) {
  if (!is_plain_tensor(object.ptr())) return false;
  const at::Tensor& tensor = tensor_of(object.ptr());
  if (tensor.layout() != at::kStrided || tensor.is_meta() || tensor.is_inference()) return false;
  if (tensor.storage().nbytes() == 0) return false;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.stride(i) == 0 && tensor.size(i) > 1) return false;
  }
  return true;
}

// Each once, by its first name.
NamedTensors writable(const py::dict& tensors) {
  NamedTensors found;
  std::set<PyObject*> known;
  for (const auto& [name, tensor] : tensors) {
    if (is_writable(tensor) && known.insert(tensor.ptr()).second) {
      found.emplace_back(name.cast<std::string>(), tensor_of(tensor.ptr()));
    }
  }
  return found;
}

void bind_runs(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("has_bits", &has_bits, py::arg("tensor"), no_gil);
  m.def("have_same_bits", &have_same_bits, py::arg("one"), py::arg("other"), no_gil);
}

void bind_comparison(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<Difference>(m, "Difference")
      .def_readonly("index", &Difference::index)
      .def_readonly("tensor", &Difference::tensor)
      .def_property_readonly("off", [](const Difference& it) { return it.misfit.off; })
      .def_property_readonly("spread", [](const Difference& it) { return it.misfit.spread; })
      .def_property_readonly(
          "place",
          [](const Difference& it) { return py::make_tuple(it.slot, it.index, it.tensor); })
      .def("may_be_chance", &Difference::may_be_chance, py::arg("times"))
      .def("__str__", &Difference::in_words);
  py::class_<Comparison>(m, "Comparison")
      .def(py::init([](const py::dict& graph, const py::dict& module) {
             const NamedTensors of_graph = named(graph), of_module = named(module);
             const py::gil_scoped_release released;
             return std::make_unique<Comparison>(of_graph, of_module);
           }),
           py::arg("graph"), py::arg("module"))
      .def(
          "add",
          [](Comparison& comparison, const py::dict& module) {
            const NamedTensors run = named(module);
            const py::gil_scoped_release released;
            comparison.add(run);
          },
          py::arg("module"))
      .def("is_open", &Comparison::is_open, no_gil)
      .def("lies_within", &Comparison::lies_within, no_gil)
      .def("differences", &Comparison::differences, py::arg("slot"), py::arg("index"), no_gil);
}

void bind_kept(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<KeptState>(m, "KeptState")
      .def(py::init([](const std::vector<py::dict>& of_sites,
                       const std::vector<at::Tensor>& further, const py::dict& placed) {
             std::vector<NamedTensors> written;
             for (const py::dict& of_site : of_sites) written.push_back(writable(of_site));
             return std::make_unique<KeptState>(written, further, named(placed));
           }),
           py::arg("of_sites"), py::arg("further") = std::vector<at::Tensor>(),
           py::arg("placed") = py::dict())
      .def(
          "found", [](const KeptState& state, size_t site) { return in_python(state.found(site)); },
          py::arg("site"))
      .def(
          "now",
          [](const KeptState& state, size_t site) {
            NamedTensors found;
            {
              const py::gil_scoped_release released;
              found = state.now(site);
            }
            return in_python(found);
          },
          py::arg("site"))
      .def("put", py::overload_cast<size_t>(&KeptState::put, py::const_), py::arg("site"), no_gil)
      .def(
          "put",
          [](const KeptState& state, size_t site, const py::dict& contents) {
            const NamedTensors wanted = named(contents);
            const py::gil_scoped_release released;
            state.put(site, wanted);
          },
          py::arg("site"), py::arg("contents"))
      .def("put_all_back", &KeptState::put_all_back, no_gil);
  m.def("plain_tensors", &plain_tensors, py::arg("modules"));
  py::class_<PlainAttributes>(m, "PlainAttributes")
      .def(py::init<NamedModules, py::object>(), py::arg("modules"),
           py::arg("left_out") = py::tuple())
      .def("put_back", &PlainAttributes::put_back, py::kw_only(), py::arg("leaves_values") = false);
}

}  // namespace

void bind_verify(py::module_& m) {
  bind_runs(m);
  bind_comparison(m);
  bind_kept(m);
}

}  // namespace megagraph
