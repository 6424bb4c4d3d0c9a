// SPDX-License-Identifier: Apache-2.0
// Says what has changed of the modules that captures rely on.
//
// Note [Module watch]
// Parameters may move or be replaced, submodules come and go, hooks be registered. To look for each
// of these in Python is a walk over everything, before every step. The watch is one call, and a
// hash of each tells which of them differs:
// - the addresses of the parameters and buffers that graphs read, and of the parameters themselves;
// - the addresses of the parameters' main_grad;
// - which modules there are, in which order;
// - the keys of their hooks and of those on all modules, and how many hooks each of their
//   parameters and its gradient accumulator have, or that it trains without any.
// Memory that was freed counts as no address.
//
// Most of it stands in dictionaries of Python, and is read again only where one of them has
// changed (dict_events.h). What lies behind a tensor tells nobody when it changes, and is read each
// time.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/decide/eager_reason.h"
#include "csrc/watch/dict_events.h"
#include "csrc/watch/state_watch.h"

namespace megagraph {

// Some modules, of which it holds none. Needs the GIL.
class ModuleWatch {
 public:
  // None of the functions may hold the watch or a module.
  // `find_modules`: asked again whenever a submodule has come or gone, for each module with whether
  // graphs read its parameters, and its buffers. `find_state`: for a list of tensors that graphs
  // write and that no module owns.
  ModuleWatch(pybind11::object find_modules, pybind11::object find_state);

  // Expects the modules of now. Whether others were expected, or none.
  bool follow();
  // Asks again which modules graphs read, and expects all of it where it lies now.
  void follow_anew();
  // Expects the hooks of now.
  void expect_hooks();
  // Expects everything where it lies now; main gradients with `grad` alone. From now on there is
  // something to compare with.
  void expect_memory(bool grad);
  bool is_watching() const { return is_watching_; }
  // No graph reads main gradients any more.
  void forget_gradients();

  // Whether there is no difference, nor any that nobody can tell, of what it watches by now.
  bool is_as_expected();
  // Why graphs must not be replayed. `of_hooks` is asked where hooks differ and nothing that weighs
  // more does: for a reason, or for None, where those of now may be expected.
  using OfHooks = std::function<std::optional<EagerReason>()>;
  std::optional<EagerReason> difference(const OfHooks& of_hooks);
  // Whether graphs read main gradients that had no memory at the last difference(): nobody can tell
  // whether they have moved.
  bool are_gradients_away() const { return are_gradients_away_; }
  // Whether it was main gradients that have moved, and nothing else.
  bool have_only_gradients_moved() const { return have_only_gradients_moved_; }

  // What knows the modules' state: state_watch.h, Note [State]. Its hash of now; with `whole`, the
  // content of containers too, else as it was when last read.
  void set_state(std::shared_ptr<StateWatch> state) { state_watch_ = std::move(state); }
  size_t state(bool whole) { return state_watch_->now(whole); }

  // Whether every parameter that graphs read has memory, and with `grad` its main gradient.
  bool has_memory(bool grad);
  // Whether a parameter with main_grad held a gradient besides at the last look.
  bool have_other_grads() const { return have_other_grads_; }

 private:
  struct Module {
    pybind11::object reference;  // weak
    bool is_read, has_read_buffers;
    const PyObject* attributes = nullptr;  // its dictionary when it was read
    DictVersions versions{};               // of that one and of the tables in it
  };
  struct Parameter {
    PyObject* tensor;
    PyObject* main_grad;  // null where there is none
    bool is_read;
    PyObject* attributes;  // its dictionary when it was read
    uint64_t version;      // of that one
  };
  struct Hashes {
    size_t addresses = 0, gradients = 0, modules = 0, hooks = 0;
  };
  // Holds the tensors, so that nobody else gets their memory while graphs may write there.
  struct State {
    pybind11::list tensors;
    std::vector<std::pair<PyObject*, const void*>> places{};
  };

  void look();
  void read();
  size_t read_modules();
  void read_tensors(Module& module, PyObject* attributes);
  void read_parameter(PyObject* parameter, bool is_read);
  void find_modules();
  bool is_current();
  static bool has_its_main_grad(Parameter& parameter);
  State state_of_now() const;
  bool has_other_state() const;

  const pybind11::object find_modules_, find_state_;

  std::vector<Module> modules_;
  std::optional<size_t> submodules_;  // a hash, as of the time when the modules were found
  std::optional<uint64_t> seen_;      // how many events there were when the dictionaries were read
  DictVersions hooks_of_all_;         // as of then
  size_t hook_keys_ = 0;
  // Borrowed: as long as no dictionary changes, they are in theirs.
  std::vector<Parameter> parameters_;
  std::vector<PyObject*> buffers_;
  std::vector<pybind11::object> computed_;  // in no dictionary: read again each time

  Hashes now_, expected_;
  State state_;
  std::shared_ptr<StateWatch> state_watch_;
  std::optional<size_t> expected_layers_;
  bool is_watching_ = false, watches_gradients_ = false;
  bool have_parameters_memory_ = true, have_gradients_memory_ = true, have_other_grads_ = false;
  bool are_gradients_away_ = false, have_only_gradients_moved_ = false;
};

}  // namespace megagraph
