// SPDX-License-Identifier: Apache-2.0
#include "csrc/watch/state_watch.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "csrc/watch/dict_events.h"
#include "csrc/watch/hash.h"
#include "csrc/watch/references.h"
#include "csrc/watch/serials.h"
#include "csrc/watch/state_items.h"
#include "csrc/watch/values.h"
#include "csrc/torch/python_tensors.h"

namespace py = pybind11;

namespace megagraph {

// Whoever has attributes that are part of the state.
struct StateWatch::Owner {
  enum class Kind { kModule, kConfiguration, kClass, kAllModules };

  Kind kind = Kind::kModule;
  // Of a class: Python gives it another one whenever it, or one above it, changes.
  unsigned int tag = 0;
  py::object reference;  // weak
  // Of a configuration or class: the first module that has it, and as what.
  size_t holder = 0;
  std::string place;

  DictFlag has_changed = std::make_shared<bool>(true);
  DictVersions versions;  // of its dictionaries, the own one first
  PyTypeObject* type = nullptr;
  PyObject* attributes = nullptr;  // of a module or configuration the own one
  bool computes_mode = false;      // a scripted module's `training` is in no dictionary
  size_t hash = 0, containers = 0;
  size_t followed = 0;  // what of it has items of its own: its class and its configurations
  struct Kept {
    PyObject *name, *value;
    size_t hash;
  };
  // Borrowed from the owner's dictionary: there as long as that one does not change, `is_there()`.
  std::vector<Kept> mutables, configurations;
  StateTensors tensors;

  StateItems items(const StateRules& rules) const {
    if (kind == Kind::kAllModules) return items_of_global_hooks(rules);
    const py::object object = referent(reference.ptr());
    if (!object) return {};
    if (kind == Kind::kClass) return items_of_class(object, rules);
    return kind == Kind::kModule ? items_of_module(object, rules)
                                 : items_of_configuration(object, rules);
  }

  bool is_current() const { return !computes_mode && is_there(); }

  // Whether what was borrowed of it is still there. Ask again wherever Python may have run.
  bool is_there() const {
    return !*has_changed && has_its_tag() && has_its_dict() && versions.are_current();
  }

  // The same; what is not there is forgotten, and read again at the next look.
  bool keeps_what_is_there() {
    if (is_there()) return true;
    *has_changed = true;
    mutables.clear();
    configurations.clear();
    tensors.clear();
    return false;
  }

  // Returns whether something else of it has items of its own.
  bool read(const StateRules& rules) {
    // Until all of it was read: an error half way leaves it to be read again.
    const struct Unread {
      const DictFlag& has_changed;
      const int errors = std::uncaught_exceptions();
      ~Unread() {
        if (std::uncaught_exceptions() > errors) *has_changed = true;
      }
    } unread{has_changed};
    *has_changed = false;
    watch_dicts();
    mutables.clear();
    configurations.clear();
    tensors.clear();
    hash = containers = 0;
    const StateItems found = items(rules);
    for (const StateItem& item : found) {
      (item.is_mutable ? containers : hash) += summand(item.name.ptr(), item.hash);
      for (const py::object& dict : item.dicts) {
        watch_content(dict.ptr(), has_changed);
        versions.add(dict.ptr());
      }
      const Kept kept{item.name.ptr(), item.value.ptr(), item.hash};
      if (item.is_mutable) mutables.push_back(kept);
      if (item.is_configuration) configurations.push_back(kept);
    }
    if (kind == Kind::kModule && is_there()) tensors = tensors_of_module(attributes);
    Hash now(type == nullptr ? 0 : serial_of(reinterpret_cast<PyObject*>(type)));
    for (const Kept& item : configurations) now.mix(item.hash);
    keeps_what_is_there();
    return std::exchange(followed, now.value()) != now.value();
  }

  // It may be given another class or dictionary, which is written in no dictionary.
  bool is_same_object() const {
    const py::object object = reference ? referent(reference.ptr()) : py::object();
    return !object || (Py_TYPE(object.ptr()) == type && has_its_dict());
  }

  bool has_its_dict() const {
    const bool has_one = kind == Kind::kModule || kind == Kind::kConfiguration;
    return !has_one || has_attributes(reference.ptr(), attributes);
  }

  // Nothing else tells that a class has changed.
  bool has_its_tag() const {
    if (kind != Kind::kClass) return true;
    const py::object type = referent(reference.ptr());
    return type && tag != 0 && tag_of(type.ptr()) == tag;
  }

  void read_containers(bool reads_scalars) {
    if (mutables.empty()) return;
    size_t sum = 0;
    for (size_t i = 0; keeps_what_is_there() && i < mutables.size(); ++i) {
      const auto name = py::reinterpret_borrow<py::object>(mutables[i].name);
      const auto value = py::reinterpret_borrow<py::object>(mutables[i].value);
      sum += summand(name.ptr(), ValueHasher(reads_scalars)(value.ptr()));
    }
    containers = sum;
  }

 private:
  void watch_dicts() {
    versions.clear();
    attributes = nullptr;
    type = nullptr;
    if (kind == Kind::kAllModules) {
      for (PyObject* table : global_hook_tables()) watch_table(table);
      return;
    }
    const py::object object = referent(reference.ptr());
    if (!object) return;  // nothing is left to be watched
    if (kind == Kind::kClass) {
      static const py::str& forward = interned("forward");
      _PyType_Lookup(reinterpret_cast<PyTypeObject*>(object.ptr()), forward.ptr());  // gives it one
      tag = tag_of(object.ptr());
      return;
    }
    static const py::str& training = interned("training");
    type = Py_TYPE(object.ptr());
    attributes = attributes_of(object.ptr()).ptr();  // which the object holds
    watch_dict(attributes, has_changed);
    versions.add(attributes);
    if (kind != Kind::kModule) return;
    computes_mode = entry(attributes, training) == nullptr;
    for (PyObject* table : tables_of_module(attributes)) watch_table(table);
  }

  void watch_table(PyObject* dict) {
    if (dict == nullptr || !PyDict_Check(dict)) return;
    watch_content(dict, has_changed);
    versions.add(dict);
  }

  // 0 if it has none, as after a change, until somebody looks something up in it.
  static unsigned int tag_of(PyObject* type) {
    auto* const object = reinterpret_cast<PyTypeObject*>(type);
#if PY_VERSION_HEX < 0x030c0000
    if (!PyType_HasFeature(object, Py_TPFLAGS_VALID_VERSION_TAG)) return 0;
#endif
    return object->tp_version_tag;
  }
};

StateWatch::StateWatch(const py::list& modules, py::object block, const py::iterable& left_out,
                       py::object is_expected_hook, at::Device device)
    : block_(std::move(block)),
      is_expected_hook_(std::move(is_expected_hook)),
      reads_scalars_(!device.is_cpu()) {
  const py::object empty = py::module_::import("torch.nn").attr("Module")();
  for (const auto& [name, value] : py::dict(empty.attr("__dict__"))) {
    if (name.cast<std::string>() != "training") skipped_.add(name);
  }
  for (const py::handle name : left_out) {
    const py::str& kept = interned(name.cast<std::string>().c_str());
    ignore_key(kept.ptr());
    skipped_.add(kept);
  }
  for (const py::handle reference : modules) {
    owners_.push_back(std::make_unique<Owner>());
    owners_.back()->reference = py::reinterpret_borrow<py::object>(reference);
  }
  owners_.push_back(std::make_unique<Owner>());
  owners_.back()->kind = Owner::Kind::kAllModules;
}

StateWatch::~StateWatch() = default;

size_t StateWatch::now(bool whole) {
  if (whole) look_at_objects();
  refresh();
  if (whole) {
    read_containers();
    refresh();  // what has changed meanwhile
  }
  const size_t trained = which_are_trained();  // before anything runs Python
  const auto list = py::reinterpret_borrow<py::object>(list_of_layers());
  Hash hash(hash_);
  hash.mix(list ? serial_of(list.ptr()) : 0);
  hash.mix(trained);
  if (!keys_.empty()) hash.mix(of_keys());
  return hash.value();
}

std::optional<size_t> StateWatch::layers() const {
  static const py::str& layers = interned("layers");
  const py::object block = referent(block_.ptr());
  const bool sees_them = block && !hides_registered(block.ptr(), layers);
  PyObject* const list = sees_them ? list_of_layers() : nullptr;
  PyObject* const table = list == nullptr ? nullptr : registered(list);
  if (table == nullptr) return {};
  Hash hash(serial_of(list));
  PyObject *name = nullptr, *layer = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(table, &place, &name, &layer)) hash.mix(serial_of(layer));
  return hash.value();
}

// A forward of the block has something else stand in for its attribute.
PyObject* StateWatch::list_of_layers() const {
  static const py::str& layers = interned("layers");
  const py::object block = referent(block_.ptr());
  return block ? registered(block.ptr(), layers) : nullptr;
}

void StateWatch::look_at_objects() {
  for (const auto* owners : {&owners_, &configurations_}) {
    for (const auto& owner : *owners) {
      if (owner->is_same_object()) continue;
      *owner->has_changed = true;
      is_read_ = false;
    }
  }
}

void StateWatch::refresh() {
  const uint64_t events = dict_events();
  const bool classes_changed = !std::all_of(classes_.begin(), classes_.end(),
                                            [](const auto& known) { return known->has_its_tag(); });
  if (kCanTellDictEvents && is_read_ && seen_ == events && !classes_changed) return;
  const bool was_read = is_read_;  // else an error may have ended the last look halfway
  is_read_ = false;
  const StateRules rules = this->rules();
  bool has_changed = classes_changed || !was_read, have_others = !was_read;
  const auto look_at = [&](const Owners& owners) {
    for (const auto& owner : owners) {
      if (owner->is_current()) continue;
      has_changed = true;
      have_others = owner->read(rules) || have_others;
    }
  };
  look_at(owners_);
  if (have_others) follow_configurations();
  if (have_others || classes_changed) follow_classes();
  look_at(configurations_);
  look_at(classes_);
  if (has_changed) {
    combine();
    tensors_.clear();
    for (const auto& owner : owners_) {
      owner->keeps_what_is_there();  // while others were read
      for (const StateTensor& each : owner->tensors) tensors_.push_back({each.tensor, false});
    }
    trained_.reset();
  }
  seen_ = events;
  is_read_ = true;
  for (const auto& owner : owners_) is_read_ = is_read_ && !owner->computes_mode;
}

// What owners hold that has items of its own: as it was, where it was known.
class StateWatch::Followed {
 public:
  Followed(Owners& owners, Owner::Kind kind) : owners_(owners), kind_(kind) {
    former_ = std::exchange(owners_, {});
  }

  void operator()(py::handle object, size_t holder, std::string place) {
    if (!found_.insert(object.ptr()).second) return;
    const auto known = std::find_if(former_.begin(), former_.end(), [&](const auto& other) {
      return other && referent(other->reference.ptr()).is(object);
    });
    if (known != former_.end()) {
      owners_.push_back(std::move(*known));
    } else {
      owners_.push_back(std::make_unique<Owner>());
      owners_.back()->kind = kind_;
      owners_.back()->reference = py::weakref(object);
    }
    owners_.back()->holder = holder;
    owners_.back()->place = std::move(place);
  }

 private:
  Owners& owners_;
  Owners former_;
  const Owner::Kind kind_;
  std::unordered_set<PyObject*> found_;
};

void StateWatch::follow_classes() {
  Followed follow(classes_, Owner::Kind::kClass);
  const auto follow_type = [&](const py::object& type, size_t module) {
    follow(type, module, type.attr("__name__").cast<std::string>());
  };
  follow_type(py::module_::import("torch.nn").attr("Module"), owners_.size() - 1);
  for (size_t i = 0; i + 1 < owners_.size(); ++i) {
    const py::object module = referent(owners_[i]->reference.ptr());
    if (module) follow_type(py::type::of(module), i);
  }
}

void StateWatch::follow_configurations() {
  Followed follow(configurations_, Owner::Kind::kConfiguration);
  for (size_t i = 0; i < owners_.size(); ++i) {
    Owner& owner = *owners_[i];
    for (size_t at = 0; owner.keeps_what_is_there() && at < owner.configurations.size(); ++at) {
      const auto value = py::reinterpret_borrow<py::object>(owner.configurations[at].value);
      follow(value, i, py::str(py::handle(owner.configurations[at].name)).cast<std::string>());
    }
  }
}

void StateWatch::read_containers() {
  for (const auto* owners : {&owners_, &configurations_, &classes_}) {
    for (const auto& owner : *owners) owner->read_containers(reads_scalars_);
  }
  combine();
}

void StateWatch::combine() {
  Hash hash;
  for (const auto* owners : {&owners_, &configurations_, &classes_}) {
    for (const auto& owner : *owners) hash.mix(owner->hash + spread(owner->containers));
  }
  hash_ = hash.value();
}

// No dictionary tells of it, so each tensor is asked in each call.
size_t StateWatch::which_are_trained() {
  bool is_known = trained_.has_value();
  for (Flag& each : tensors_) {
    const bool is_trained = requires_grad(each.tensor);
    is_known = is_known && is_trained == each.is_trained;
    each.is_trained = is_trained;
  }
  if (is_known) return *trained_;
  Hash hash;
  for (const auto& owner : owners_) {
    size_t sum = 0;
    for (const StateTensor& each : owner->tensors) {
      if (requires_grad(each.tensor)) sum += each.hash;
    }
    hash.mix(sum);
  }
  trained_ = hash.value();
  return *trained_;
}

size_t StateWatch::of_keys() const {
  Hash hash;
  for (const py::handle key : keys_) hash.mix(ValueHasher(reads_scalars_)(key().ptr()));
  return hash.value();
}

py::list StateWatch::items() {
  refresh();
  const StateRules rules = this->rules();
  py::list found;
  const auto append = [&](size_t module, const std::string& before, const StateItem& item) {
    const auto name = before + py::str(item.name).cast<std::string>();
    found.append(py::make_tuple(module, name, item.hash, describe(item)));
  };
  for (size_t i = 0; i < owners_.size(); ++i) {
    for (const StateItem& item : owners_[i]->items(rules)) append(i, "", item);
    for (size_t at = 0; owners_[i]->keeps_what_is_there() && at < owners_[i]->tensors.size();
         ++at) {
      const StateTensor& each = owners_[i]->tensors[at];
      const py::bool_ flag(requires_grad(each.tensor));
      const auto name = py::reinterpret_borrow<py::object>(each.name);
      append(i, "requires_grad of ", {name, flag, ValueHasher()(flag.ptr())});
    }
  }
  for (const auto* owners : {&configurations_, &classes_}) {
    for (const auto& owner : *owners) {
      for (const StateItem& item : owner->items(rules)) {
        append(owner->holder, owner->place + ".", item);
      }
    }
  }
  for (const py::handle key : keys_) {
    const py::object value = key();
    const auto name = "watch() of " + py::repr(key).cast<std::string>();
    const StateItem item{py::reinterpret_borrow<py::object>(key), value,
                         ValueHasher(reads_scalars_)(value.ptr())};
    found.append(py::make_tuple(owners_.size() - 1, name, item.hash, describe(item)));
  }
  return found;
}

}  // namespace megagraph
