// SPDX-License-Identifier: Apache-2.0
// The Python face of a site: a callable on the hot path, so a bare CPython type with vectorcall.
#pragma once

#include <torch/csrc/python_headers.h>

#include <memory>

#include "csrc/bank/replay/graph_bank.h"

namespace megagraph {

// Makes the type; called once, by the module's initialisation. Null with a Python error set.
PyObject* make_site_type();

// A new reference to the callable of `bank`'s site `index`. It keeps the bank alive.
PyObject* make_site_object(std::shared_ptr<GraphBank> bank, int index);

// The same of all its sites in one go; it counts no call that cannot replay.
PyObject* make_span_object(std::shared_ptr<GraphBank> bank);

}  // namespace megagraph
