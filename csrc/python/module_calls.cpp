// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/module_calls.h"

#include <algorithm>

#include "csrc/watch/references.h"

namespace py = pybind11;

namespace megagraph {
namespace {

// As `getattr()`, which for what is registered runs Python of `torch.nn.Module`.
py::object submodule(const py::object& module, const py::str& name) {
  PyObject* const found =
      hides_registered(module.ptr(), name) ? nullptr : registered(module.ptr(), name);
  return found != nullptr ? py::reinterpret_borrow<py::object>(found) : py::getattr(module, name);
}

py::object block_of(const py::object& model) {
  static const py::str& decoder = interned("decoder");
  return submodule(model, decoder);
}

bool has_forward(const py::object& module, const py::object& function) {
  static const py::str &forward = interned("forward"), &of_method = interned("__func__");
  const py::object called = py::getattr(module, forward);
  const py::object run =
      PyMethod_Check(called.ptr())
          ? py::reinterpret_borrow<py::object>(PyMethod_GET_FUNCTION(called.ptr()))
          : py::getattr(called, of_method, called);
  return run.is(function());
}

}  // namespace

bool has_forwards(const py::object& model, const py::object& of_model, const py::object& of_block) {
  return has_forward(model, of_model) && has_forward(block_of(model), of_block);
}

bool has_layers(const py::object& model) {
  static const py::str& name = interned("layers");
  const py::object layers = submodule(block_of(model), name);
  PyObject* const table = registered(layers.ptr());
  return table == nullptr ? py::len(layers) != 0 : PyDict_GET_SIZE(table) != 0;
}

py::tuple by_name(const py::sequence& names, const py::tuple& args, const py::dict& kwargs) {
  const size_t count = std::min(names.size(), args.size());
  py::dict named;
  for (size_t i = 0; i < count; ++i) named[names[i]] = args[i];
  if (PyDict_Update(named.ptr(), kwargs.ptr()) != 0) throw py::error_already_set();
  return py::make_tuple(args[py::slice(static_cast<py::ssize_t>(count), {}, {})], named);
}

}  // namespace megagraph
