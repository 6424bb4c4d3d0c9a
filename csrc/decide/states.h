// SPDX-License-Identifier: Apache-2.0
// Numbers the states that a model's layers are met in, alike on all ranks that share its
// communicators.
//
// A state is known by a fingerprint of the modules (csrc/watch/state_watch.h, Note [State]) and by
// the numeric settings. It is met between steps, where all ranks say which one each of them is in:
// a state of the group is what all of them are in. Inside of a step it is the one in which this
// rank was like that before.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "csrc/decide/eager_reason.h"

namespace megagraph {

class States {
 public:
  // `run_alike`: the ranks run the same packs, and so calls in the same states.
  States(int size, bool run_alike);

  // -- between steps --
  // What this rank tells the others: the state that it is in, and those that its calls were in.
  std::vector<int64_t> local_state(int rank, uint64_t fingerprint, uint64_t settings);
  // Learns the state of the group from the largest of what each rank has said. False if the ranks'
  // calls since the last boundary were in different states.
  bool agree(const std::vector<int64_t>& largest);
  // The number of the state at the last boundary, and whether it was met there for the first time.
  int64_t current() const { return current_; }
  bool is_new() const { return is_new_; }
  // Whether this rank said the same when it was last asked.
  bool is_met(uint64_t fingerprint, uint64_t settings) const {
    return fingerprint == fingerprint_ && settings == settings_;
  }
  // Whether there are more states than are remembered for long.
  bool has_many() const;
  // Forgets the states that were not used for the longest time, while there are too many of them,
  // and returns the numbers that nobody will be told of again. Those in `keep` have to be found
  // again.
  std::set<int64_t> forget_oldest(std::set<int64_t> keep);
  // The present state has one more fingerprint: values have settled.
  void add_name(uint64_t fingerprint);
  // The present state has another fingerprint from now on, since other modules count. What had the
  // one before may differ in these.
  void rename(uint64_t fingerprint);
  // Whether graphs may be captured in the state of now, be it in the place of others: those in
  // `captured` have some, and `most` may. To be asked before each step that wants them.
  //
  // States that alternate and are more than may have graphs would drive out each other's for ever.
  // So one whose graphs have gone twice has to be asked for in four steps in a row, one whose have
  // gone three times in eight, and so on. States that are new now and then and never come back
  // would as well: for every `2 * most` that went, any has to be asked for twice as often, up
  // to 32.
  bool ask_for_place(const std::set<int64_t>& captured, size_t most);
  // Before a capture: the states whose graphs are to go for it, as they were not used for the
  // longest time.
  std::set<int64_t> make_room(std::set<int64_t> captured, size_t most);

  // -- inside of a step --
  // The number of the state that a call is in; a negative one has no graphs.
  int64_t of_call(uint64_t fingerprint);
  // The last call's under other numeric settings, likewise.
  int64_t under(uint64_t settings);

  // Why graphs of none of the states in `captured` serve another one: the least that differs.
  EagerReason eager_reason(int64_t number, const std::vector<int64_t>& captured) const;

 private:
  using Own = std::pair<uint64_t, uint64_t>;  // fingerprint and settings
  struct Group {
    std::vector<int64_t> ranks;  // the state of each, as it numbers them itself
    int64_t number;
  };

  EagerReason difference(int64_t number, int64_t other) const;
  std::set<int64_t> own_numbers(int64_t number) const;
  std::set<uint64_t> fingerprints(int64_t number) const;
  int64_t find(uint64_t fingerprint, uint64_t settings);
  int64_t number_of_own(const Own& own);
  int64_t add(std::vector<int64_t> ranks);
  void use(size_t index);  // it comes last from now on

  const int size_;
  const bool compares_calls_, orders_by_calls_;
  int rank_ = 0;
  std::map<Own, int64_t> own_;
  int64_t num_own_ = 0, num_ = 0;
  std::vector<Group> groups_;  // the one used last comes last
  uint64_t settings_ = 0, fingerprint_ = 0;
  std::optional<std::pair<uint64_t, int64_t>> last_;  // fingerprint and number of the last call
  uint32_t calls_ = 0;                                // a checksum of the states of a step's calls
  int64_t current_ = 0;
  bool is_new_ = false;
  std::set<int64_t> of_calls_alone_;      // states that no boundary has met yet
  std::map<int64_t, int> times_dropped_;  // of each state: its graphs, for those of another one
  size_t num_dropped_ = 0;                // of all
  int64_t waiting_ = 0;                   // the state that was asked for last
  int waited_ = 0;                        // times in a row
};

}  // namespace megagraph
