// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/dict_events.h"

#include <pybind11/pybind11.h>

namespace megagraph {
namespace {

uint64_t events = 0;  // under the GIL

}  // namespace

#if PY_VERSION_HEX >= 0x030c0000

namespace {

int count_event(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
  ++events;
  return 0;
}

}  // namespace

void watch_dict(PyObject* dict) {
  static const int watcher = PyDict_AddWatcher(&count_event);
  if (watcher < 0 || PyDict_Watch(watcher, dict) < 0) throw pybind11::error_already_set();
}

uint64_t dict_events() { return events; }

#else

void watch_dict(PyObject*) {}
uint64_t dict_events() { return events; }

#endif

}  // namespace megagraph
