// SPDX-License-Identifier: Apache-2.0
// The Python face of a site: a callable on the hot path, so a bare CPython type with vectorcall.
#pragma once

#include <torch/csrc/python_headers.h>

#include <memory>

#include "csrc/bank/chunk.h"

namespace megagraph {

// Makes the type; called once, by the module's initialisation. Null with a Python error set.
PyObject* make_site_type();

// A new reference to the callable of `chunk`'s site `rank`. It keeps the chunk alive.
PyObject* make_site_object(std::shared_ptr<Chunk> chunk, int rank);

// The same of all its sites in one go; it counts no call that cannot replay.
PyObject* make_run_object(std::shared_ptr<Chunk> chunk);

}  // namespace megagraph
