// SPDX-License-Identifier: Apache-2.0
// Tells whether any of some dictionaries has changed, without looking at them.
//
// Python has had watchers of dictionaries since 3.12. Before, nobody can tell.
#pragma once

#include <Python.h>

#include <cstdint>

namespace megagraph {

// From now on a change of the dictionary, its end too, is an event. Needs the GIL; throws with a
// Python error where Python has no watcher left.
void watch_dict(PyObject* dict);

// How many events there were. Without a meaning where nobody can tell.
uint64_t dict_events();

#if PY_VERSION_HEX >= 0x030c0000
inline constexpr bool kCanTellDictEvents = true;
#else
inline constexpr bool kCanTellDictEvents = false;
#endif

}  // namespace megagraph
