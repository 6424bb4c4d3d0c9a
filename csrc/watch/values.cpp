// SPDX-License-Identifier: Apache-2.0
#include "csrc/watch/values.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "csrc/watch/dict_events.h"
#include "csrc/watch/hash.h"
#include "csrc/watch/references.h"
#include "csrc/watch/serials.h"
#include "csrc/torch/made_once.h"
#include "csrc/torch/python_tensors.h"
#include "csrc/torch/storages.h"

namespace py = pybind11;

namespace megagraph {
namespace {

constexpr int kDeepest = 8;
constexpr Py_ssize_t kLargest = 4096;

size_t of_identity(PyObject* object) { return spread(serial_of(object)); }

// What was there before the first class of anybody's is never freed.
size_t of_address(const void* object) { return spread(reinterpret_cast<uint64_t>(object)); }

size_t of_type(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  return PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE)
             ? of_identity(reinterpret_cast<PyObject*>(type))
             : of_address(type);
}

size_t combined(size_t first, size_t second) {
  Hash hash(first);
  hash.mix(second);
  return hash.value();
}

// As Python hashes it, and by its type: 1, 1.0 and True are three values.
size_t of_own_hash(PyObject* value) {
  const Py_hash_t hash = PyObject_Hash(value);
  if (hash == -1 && PyErr_Occurred()) throw py::error_already_set();
  return combined(of_type(value), static_cast<size_t>(hash));
}

// Python gives -1 and -2 one hash, and 2**64 that of 8.
size_t of_integer(PyObject* value) {
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (overflow != 0) return spread(of_own_hash(value));
  return combined(of_type(value), static_cast<size_t>(number));
}

// Bit by bit: -0.0 is another value than 0.0, and a NaN one value.
size_t of_bits(double number) {
  uint64_t bits = 0;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

size_t of_float(PyObject* value) {
  return combined(of_type(value), of_bits(PyFloat_AsDouble(value)));
}

size_t of_complex(PyObject* value) {
  const Py_complex number = PyComplex_AsCComplex(value);
  return combined(of_type(value), combined(of_bits(number.real), of_bits(number.imag)));
}

struct Types {
  py::object module = py::module_::import("torch.nn").attr("Module");
  py::object device = py::module_::import("torch").attr("device");
  py::object enumeration = py::module_::import("enum").attr("Enum");
  py::object number = py::module_::import("numbers").attr("Number");
  py::object namespaces[2] = {py::module_::import("types").attr("SimpleNamespace"),
                              py::module_::import("argparse").attr("Namespace")};
};

const Types& types() {
  return made_once([] { return Types{}; });
}

bool is_a(PyObject* value, const py::object& type) {
  return PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(type.ptr()));
}

// Another one of its type may come to its address.
bool takes_no_weak_reference(PyObject* value) {
  return Py_TYPE(value)->tp_weaklistoffset == 0 && !PyType_Check(value);
}

// Such as a Decimal, or one of numpy's: each is a new object. Its hash is the same for -1 and -2.
bool is_number(PyObject* value) { return py::isinstance(value, types().number); }

size_t of_its_text(PyObject* value) {
  return combined(of_type(value), static_cast<size_t>(py::hash(py::repr(py::handle(value)))));
}

// The fields of a dataclass; null of any other object, of a class and of a module.
PyObject* fields_of(PyObject* object) {
  static const py::str& name = interned("__dataclass_fields__");
  if (PyType_Check(object) || is_a(object, types().module)) return nullptr;
  PyObject* fields = _PyType_Lookup(Py_TYPE(object), name.ptr());
  return fields != nullptr && PyDict_Check(fields) ? fields : nullptr;
}

// Null of what is not plain.
std::optional<size_t> of_plain(PyObject* value) {
  if (value == Py_None || PyBool_Check(value)) return of_address(value);
  // Most of what is met, before questions that walk through base classes.
  if (PyUnicode_CheckExact(value)) return of_own_hash(value);
  if (PyLong_CheckExact(value)) return of_integer(value);
  if (PyList_CheckExact(value) || PyDict_CheckExact(value) || PyTuple_CheckExact(value)) return {};
  if (is_a(value, types().enumeration)) return of_identity(value);
  if (PyLong_Check(value)) return of_integer(value);
  if (PyFloat_Check(value)) return of_float(value);
  if (PyComplex_Check(value)) return of_complex(value);
  if (PyUnicode_Check(value) || PyBytes_Check(value)) return of_own_hash(value);
  if (is_a(value, types().device)) return of_own_hash(value);
  return {};
}

}  // namespace

bool mix_address(Hash& hash, const at::Tensor& tensor) {
  const bool is_stored = tensor.has_storage() && tensor.storage().nbytes() > 0;
  hash.mix(is_stored ? tensor.const_data_ptr() : nullptr);
  auto form = static_cast<size_t>(tensor.scalar_type());
  if (tensor.layout() == at::kStrided) {
    for (const int64_t size : tensor.sizes()) form = 1000003 * form + static_cast<size_t>(size);
    for (const int64_t step : tensor.strides()) form = 1000003 * form + static_cast<size_t>(step);
  }
  hash.mix(form);
  return is_stored || tensor.numel() == 0;
}

bool is_plain(PyObject* value) { return of_plain(value).has_value(); }

bool is_configuration(PyObject* object) {
  const auto& [one, other] = types().namespaces;
  if (is_a(object, one) || is_a(object, other)) return true;
  const PyTypeObject* type = Py_TYPE(object);
  return fields_of(object) != nullptr && type->tp_dictoffset != 0 && type->tp_weaklistoffset != 0;
}

size_t ValueHasher::operator()(PyObject* value) {
  if (const auto plain = of_plain(value)) return *plain;
  auto* const dicts = dicts_;
  if (is_tensor(value)) {
    const size_t of_it = of_tensor(value);
    dicts_ = dicts;
    return of_it;
  }
  if (depth_ >= kDeepest) return of_identity(value);
  // Containers that know each other have more paths than anybody can walk.
  const auto known = seen_.find(value);
  if (known != seen_.end() && known->second.depth <= depth_) return known->second.hash;
  seen_[value] = {py::reinterpret_borrow<py::object>(value), depth_, spread(seen_.size())};
  ++depth_;
  size_t hash = 0;
  if (PySlice_Check(value)) {
    const auto* const slice = reinterpret_cast<PySliceObject*>(value);
    Hash ends(of_type(value));
    for (PyObject* end : {slice->start, slice->stop, slice->step}) ends.mix((*this)(end));
    hash = ends.value();
  } else if (PyTuple_Check(value) || PyList_Check(value)) {
    if (PyList_Check(value)) meet_mutable();
    hash = combined(of_type(value), of_sequence(value));
  } else if (PyDict_Check(value)) {
    if (dicts_ == nullptr) {
      meet_mutable();
    } else {
      dicts_->push_back(py::reinterpret_borrow<py::object>(value));
    }
    hash = combined(of_type(value), of_entries(value, true));
  } else if (PyAnySet_Check(value)) {
    if (PySet_Check(value)) meet_mutable();
    hash = combined(of_type(value), of_set(value));
  } else if (is_configuration(value)) {
    const py::object attributes = attributes_of(value);
    // Who looks at versions of dictionaries would look at one that the object has no more.
    if (dicts_ == nullptr || !kCanTellDictEvents) {
      meet_mutable();
    } else {
      dicts_->push_back(attributes);
      has_met_mutable_ = true;  // the object may be given another one
    }
    hash = combined(of_identity(value), of_entries(attributes.ptr(), false));
  } else if (PyObject* fields = fields_of(value)) {
    meet_mutable();
    hash = combined(of_identity(value), of_slots(value, fields));
  } else if (takes_no_weak_reference(value) && is_number(value)) {
    hash = of_its_text(value);
  } else if (takes_no_weak_reference(value) &&
             PyType_HasFeature(Py_TYPE(value), Py_TPFLAGS_HEAPTYPE)) {
    meet_mutable();
    hash = combined(of_identity(value), of_members(value));
  } else {
    hash = of_identity(value);
  }
  --depth_;
  dicts_ = dicts;
  seen_[value].hash = hash;
  return hash;
}

size_t ValueHasher::of_tensor(PyObject* value) {
  const at::Tensor& tensor = tensor_of(value);
  const bool stored =
      is_plain_tensor(value) && tensor.has_storage() && tensor.storage().nbytes() > 0;
  Hash hash(of_identity(value));
  if (is_plain_tensor(value)) mix_address(hash, tensor);
  hash.mix(size_t{tensor.requires_grad()});
  meet_mutable();  // it may be given other memory or another form
  if (stored && reads_scalars_ && may_be_numbers(tensor)) {
    const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
    for (size_t i = 0; i < tensor.nbytes(); ++i) hash.mix(size_t{bytes[i]});
  }
  return hash.value();
}

void ValueHasher::meet_mutable() {
  has_met_mutable_ = true;
  dicts_ = nullptr;
}

// Values that take no weak reference are asked in Python, and another thread may have its turn
// meanwhile: what is looked at is held, and a container may be another one at its end.
size_t ValueHasher::of_sequence(PyObject* sequence) {
  const auto size = [sequence] { return PySequence_Fast_GET_SIZE(sequence); };
  Hash hash(size());
  for (Py_ssize_t i = 0; i < std::min(size(), kLargest); ++i) {
    const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(sequence, i));
    hash.mix((*this)(item.ptr()));
  }
  return hash.value();
}

// Content is in the order in which a loop meets it. Of attributes, what was taken out and put in
// again is the same.
size_t ValueHasher::of_entries(PyObject* dict, bool in_order) {
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t place = 0, count = 0;
  Hash hash(PyDict_Size(dict));
  size_t sum = 0;
  while (count++ < kLargest && PyDict_Next(dict, &place, &key, &value)) {
    const auto held = py::reinterpret_borrow<py::object>(value);
    const auto name = py::reinterpret_borrow<py::object>(key);
    const size_t entry = combined((*this)(name.ptr()), (*this)(held.ptr()));
    if (in_order) hash.mix(entry);
    sum += entry;
  }
  hash.mix(sum);
  return hash.value();
}

// Of a dataclass without a dictionary of attributes. A field may be unset.
size_t ValueHasher::of_slots(PyObject* object, PyObject* fields) {
  Hash hash;
  for (const auto& [name, field] : py::reinterpret_borrow<py::dict>(fields)) {
    const py::object value = py::getattr(py::handle(object), name, py::none());
    hash.mix((*this)(value.ptr()));
  }
  return hash.value();
}

// Of any other object with slots.
size_t ValueHasher::of_members(PyObject* object) {
  Hash hash;
  for (const py::handle base : py::reinterpret_borrow<py::tuple>(Py_TYPE(object)->tp_mro)) {
    for (const auto& [name, member] : base.attr("__dict__").attr("copy")().cast<py::dict>()) {
      if (Py_TYPE(member.ptr()) != &PyMemberDescr_Type) continue;
      const py::object value = py::getattr(py::handle(object), name, py::none());
      hash.mix((*this)(value.ptr()));
    }
  }
  return hash.value();
}

size_t ValueHasher::of_set(PyObject* set) {
  if (PySet_Size(set) > kLargest) return combined(of_identity(set), PySet_Size(set));
  size_t sum = spread(PySet_Size(set));
  for (const py::handle item : py::reinterpret_steal<py::object>(PyFrozenSet_New(set))) {
    sum += spread((*this)(item.ptr()));
  }
  return sum;
}

}  // namespace megagraph
