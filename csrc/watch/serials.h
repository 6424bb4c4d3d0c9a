// SPDX-License-Identifier: Apache-2.0
// Numbers for Python's objects, to tell them apart for longer than they live.
#pragma once

#include <Python.h>

#include <cstdint>

namespace megagraph {

// The number of an object: never given to another one, though addresses are. Holds no reference.
// Of an object that takes no weak references it is only known that its address and type are the
// same. Needs the GIL.
uint64_t serial_of(PyObject* object);

}  // namespace megagraph
