// SPDX-License-Identifier: Apache-2.0
// Tells whether dictionaries have changed, without reading them.
//
// Python has had watchers of dictionaries since 3.12. Before that each dictionary has a version,
// which has to be looked at.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace megagraph {

#if PY_VERSION_HEX >= 0x030c0000
inline constexpr bool kCanTellDictEvents = true;
#else
inline constexpr bool kCanTellDictEvents = false;
#endif

// Set where one of the dictionaries that it watches has changed, or is gone.
using DictFlag = std::shared_ptr<bool>;

// From now on a change of the dictionary, its end too, is an event, and sets the flag where one is
// given. `only`: an interned name; changes of other keys are none. Needs the GIL; throws with a
// Python error where Python has no watcher left. Without effect where nobody can tell.
void watch_dict(PyObject* dict, PyObject* only = nullptr);
void watch_dict(PyObject* dict, const DictFlag& flag);
// The same of a dictionary that is a value or a table, whatever its keys are called.
void watch_content(PyObject* dict, const DictFlag& flag = nullptr);
// Changes of this key, an interned name, are no events in dictionaries of attributes.
void ignore_key(PyObject* name);

// How many events there were. Without a meaning where nobody can tell.
uint64_t dict_events();

// Another one after each change of the dictionary. Where events can be told it is always 0.
// Thousands are asked for in each micro-batch.
inline uint64_t dict_version([[maybe_unused]] PyObject* dict) {
#if PY_VERSION_HEX >= 0x030c0000
  return 0;
#else
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#endif
}

// Which versions dictionaries had when something was read from them. Borrowed: each must be there
// as long as those before it do not change. Keeps none where events can be told.
class DictVersions {
 public:
  void clear() { known_.clear(); }
  void add(PyObject* dict) {
    if (!kCanTellDictEvents) known_.push_back({dict, dict_version(dict)});
  }
  bool are_current() const {
    for (const Known& known : known_) {
      if (dict_version(known.dict) != known.version) return false;
    }
    return true;
  }

 private:
  struct Known {
    PyObject* dict;
    uint64_t version;
  };
  std::vector<Known> known_;
};

}  // namespace megagraph
