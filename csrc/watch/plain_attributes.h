// SPDX-License-Identifier: Apache-2.0
// What modules hold in plain attributes: finds its tensors, keeps all of it as it was, puts it
// back.
//
// Note [Plain attributes]
// A graph reads and writes the tensor that it was captured with. A module that updates it in place
// is served like one with a buffer. One that binds another tensor to the attribute (a statistic,
// say) does so once, in the capture: from then on the host reads what no replay writes, and each
// replay reads what the host has dropped. So it is with any other value: no replay counts a counter
// up. A call that leaves another tensor than it found, or one where there was none, is found in its
// warm-up, and its site stays eager.
//
// Other values may settle: some adapters set a flag of their layer in each call, to what the call
// itself goes by. So a site that leaves another value is called once more. If that one leaves all
// values, and its outputs have the same bits, no call goes by what it finds: graphs are captured
// with the values that calls leave, which stay in the module. Else the site stays eager, and all is
// put back. Neither Megatron's layers nor Transformer Engine's modules change values in each call,
// apart from fp8, statistics that are refused by name, and flags that the owner of a bank answers
// for by name.
//
// Looked at are attributes, those of dataclasses and namespaces in them, what lists, tuples, sets,
// deques and dictionaries hold, eight deep, and where generators of random numbers stand. A site
// that draws from one of its own stays eager: no verification tells draws from noise.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace megagraph {

// By what they are called.
using NamedModules = std::vector<std::pair<std::string, pybind11::object>>;

// The tensors in plain attributes by where they are, each once; not parameters and buffers.
pybind11::dict plain_tensors(const NamedModules& modules);

class PlainAttributes {
 public:
  // Objects, and what they held: copies, or where a generator stood.
  using Contents = std::vector<std::pair<pybind11::object, pybind11::object>>;

  // Of names that are left out nothing is said.
  PlainAttributes(NamedModules modules, pybind11::object left_out);

  // Gives every attribute what it had; says what has happened to the first one that is not left
  // out. `leaves_values`: but for those that are not left out either and hold no tensors.
  std::optional<std::string> put_back(bool leaves_values) const;

 private:
  struct Held {
    pybind11::object value;  // null: there was none
    Contents contents;       // of what may change while it stays the same object
  };
  struct Owner {
    std::string where;
    pybind11::object module;
    std::vector<std::pair<pybind11::object, Held>> before;
  };
  struct Change {
    const Owner* owner;
    pybind11::object name;
    Held before;
    bool is_tensor;
  };

  static bool is_as_before(const Held& before, const pybind11::object& now);
  std::vector<Change> changes() const;
  static std::string in_words(const Change& change);

  const pybind11::object left_out_;
  std::vector<Owner> owners_;
};

}  // namespace megagraph
