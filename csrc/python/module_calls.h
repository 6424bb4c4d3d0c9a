// SPDX-License-Identifier: Apache-2.0
// Calls of modules as Python makes them: which function they run, and what that is given.
#pragma once

#include <pybind11/pybind11.h>

namespace megagraph {

// Whether calls of a model and of its block of layers run the functions that these give.
bool has_forwards(const pybind11::object& model, const pybind11::object& of_model,
                  const pybind11::object& of_block);

// Whether a model's block has any layers.
bool has_layers(const pybind11::object& model);

// The arguments of a call, those by position by their names, as far as they have any.
pybind11::tuple by_name(const pybind11::sequence& names, const pybind11::tuple& args,
                        const pybind11::dict& kwargs);

}  // namespace megagraph
