// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/site_object.h"

#include <pybind11/gil.h>
#include <structmember.h>

#include <cstddef>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/bank/replay/graph_bank.h"
#include "csrc/torch/python_errors.h"
#include "csrc/torch/python_tensors.h"

namespace megagraph {
namespace {

struct SiteObject {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  std::shared_ptr<GraphBank> bank;
  int first, last;
  bool counts_eager;  // a span is tried before its sites are, and those count
};

PyTypeObject* site_type = nullptr;

// site(*inputs) -> Tensor, a tuple of tensors, or NotImplemented where the caller has to run eager,
// or, of a span, to call site by site.
PyObject* call_site(PyObject* self, PyObject* const* args, size_t flags, PyObject* keywords) {
  HANDLE_TH_ERRORS
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (keywords != nullptr && PyTuple_GET_SIZE(keywords) != 0) {
    PyErr_SetString(PyExc_TypeError, "a site takes its tensors by position, got keywords");
    return nullptr;
  }
  std::vector<at::Tensor> inputs, outputs;
  bool is_plain = true;
  inputs.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!is_tensor(args[i])) {
      PyErr_Format(PyExc_TypeError, "a site takes tensors, argument %zd is a %s", i,
                   Py_TYPE(args[i])->tp_name);
      return nullptr;
    }
    is_plain = is_plain && is_plain_tensor(args[i]);
    inputs.push_back(tensor_of(args[i]));
  }
  const auto* site = reinterpret_cast<SiteObject*>(self);
  GraphBank& bank = *site->bank;
  if (site->last != site->first && !bank.is_linked()) Py_RETURN_NOTIMPLEMENTED;
  std::optional<EagerReason> reason = EagerReason::kSignatureChanged;
  if (site->counts_eager && !bank.holds_still()) {
    reason = EagerReason::kStateChanged;
  } else if (is_plain) {
    const GraphBank::Turn turn(bank);
    // A full launch queue makes a launch wait, perhaps for another thread's Python.
    const pybind11::gil_scoped_release no_gil;
    reason = bank.replay(site->first, site->last, inputs, outputs);
  }
  if (reason) {
    if (site->counts_eager) {
      if (bank.current()) bank.run_eager_alike(bank.current()->variant(), site->first, *reason);
      bank.counters().count_eager(*reason, bank.site(site->first).calls());
    }
    Py_RETURN_NOTIMPLEMENTED;
  }
  if (outputs.size() == 1) return to_python(std::move(outputs.front()));
  PyObject* result = PyTuple_New(static_cast<Py_ssize_t>(outputs.size()));
  if (result == nullptr) return nullptr;
  for (size_t i = 0; i < outputs.size(); ++i) {
    PyTuple_SET_ITEM(result, static_cast<Py_ssize_t>(i), to_python(std::move(outputs[i])));
  }
  return result;
  END_HANDLE_TH_ERRORS
}

void dealloc_site(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<SiteObject*>(self)->bank.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* site_index(PyObject* self, void*) {
  return PyLong_FromLong(reinterpret_cast<SiteObject*>(self)->first);
}

PyMemberDef site_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(SiteObject, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyGetSetDef site_properties[] = {
    {"index", site_index, nullptr, "Place in the execution order; of a span its first one's.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot site_slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc_site)},
    {Py_tp_members, site_members},
    {Py_tp_getset, site_properties},
    {0, nullptr},
};
PyType_Spec site_spec = {"megagraph._C.Site", sizeof(SiteObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL |
                             Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                         site_slots};

}  // namespace

PyObject* make_site_type() {
  site_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&site_spec));
  return reinterpret_cast<PyObject*>(site_type);
}

namespace {

PyObject* make_object(std::shared_ptr<GraphBank> bank, int first, int last, bool counts_eager) {
  auto* self = reinterpret_cast<SiteObject*>(site_type->tp_alloc(site_type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = &call_site;
  new (&self->bank) std::shared_ptr<GraphBank>(std::move(bank));
  self->first = first;
  self->last = last;
  self->counts_eager = counts_eager;
  return reinterpret_cast<PyObject*>(self);
}

}  // namespace

PyObject* make_site_object(std::shared_ptr<GraphBank> bank, int index) {
  bank->site(index);  // throws where there is none
  return make_object(std::move(bank), index, index, /*counts_eager=*/true);
}

PyObject* make_span_object(std::shared_ptr<GraphBank> bank) {
  const int last = bank->num_sites() - 1;
  return make_object(std::move(bank), 0, last, /*counts_eager=*/false);
}

}  // namespace megagraph
