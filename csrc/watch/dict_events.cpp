// SPDX-License-Identifier: Apache-2.0
#include "csrc/watch/dict_events.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace megagraph {

#if PY_VERSION_HEX >= 0x030c0000

namespace {

struct Watched {
  PyObject* only = nullptr;  // changes of other keys are no events
  bool is_content = false;   // ignored keys are not ignored here
  std::vector<std::weak_ptr<bool>> flags;
};

// All of this under the GIL, and never destroyed: dictionaries go after it.
uint64_t events = 0;
auto& watched_dicts = *new std::unordered_map<PyObject*, Watched>;
auto& ignored_keys = *new std::unordered_set<PyObject*>;

// A name that is not interned may be any: it counts.
bool is_of_interest(const Watched& watched, PyObject* key) {
  if (key == nullptr || !PyUnicode_Check(key) || !PyUnicode_CHECK_INTERNED(key)) return true;
  if (watched.is_content) return true;
  return watched.only == nullptr ? ignored_keys.count(key) == 0 : key == watched.only;
}

int on_event(PyDict_WatchEvent event, PyObject* dict, PyObject* key, PyObject*) {
  const auto found = watched_dicts.find(dict);
  if (found == watched_dicts.end() || !is_of_interest(found->second, key)) return 0;
  ++events;
  for (const auto& flag : found->second.flags) {
    if (const auto held = flag.lock()) *held = true;
  }
  if (event == PyDict_EVENT_DEALLOCATED) watched_dicts.erase(found);
  return 0;
}

// Its entry, and whether it is new.
std::pair<Watched*, bool> watch(PyObject* dict) {
  static const int watcher = PyDict_AddWatcher(&on_event);
  if (watcher < 0) {
    PyErr_Clear();  // set at the first call alone
    throw std::runtime_error(
        "expected one of Python's watchers of dictionaries: others have all of them");
  }
  if (PyDict_Watch(watcher, dict) < 0) throw pybind11::error_already_set();
  const auto [place, is_new] = watched_dicts.try_emplace(dict);
  return {&place->second, is_new};
}

}  // namespace

void watch_dict(PyObject* dict, PyObject* only) {
  const auto [watched, is_new] = watch(dict);
  if (is_new) watched->only = only;
  if (watched->only != only) watched->only = nullptr;  // the stricter of two wishes
}

void watch_dict(PyObject* dict, const DictFlag& flag) {
  Watched& watched = *watch(dict).first;
  watched.only = nullptr;
  auto& flags = watched.flags;
  const auto is_gone = [](const std::weak_ptr<bool>& other) { return other.expired(); };
  flags.erase(std::remove_if(flags.begin(), flags.end(), is_gone), flags.end());
  const auto is_flag = [&](const std::weak_ptr<bool>& other) { return other.lock() == flag; };
  if (std::none_of(flags.begin(), flags.end(), is_flag)) flags.emplace_back(flag);
}

void watch_content(PyObject* dict, const DictFlag& flag) {
  flag ? watch_dict(dict, flag) : watch_dict(dict);
  watched_dicts.at(dict).is_content = true;
}

void ignore_key(PyObject* name) { ignored_keys.insert(name); }
uint64_t dict_events() { return events; }

#else

void watch_dict(PyObject*, PyObject*) {}
void watch_dict(PyObject*, const DictFlag&) {}
void watch_content(PyObject*, const DictFlag&) {}
void ignore_key(PyObject*) {}
uint64_t dict_events() { return 0; }

#endif

}  // namespace megagraph
