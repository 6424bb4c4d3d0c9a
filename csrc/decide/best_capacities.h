// SPDX-License-Identifier: Apache-2.0
// The capacities that pad packs which have been seen with the fewest tokens.
//
// Note [Best capacities]
// A pack goes to the capacity of fewest tokens that holds it (`decide()`), and is padded by what
// that has more. Documents are padded too, with empty ones, which cost next to nothing: of two
// choices the one of fewer padded tokens is better, and only of equal ones that of fewer padded
// documents.
//
// So nothing speaks against room for documents where it saves tokens. Without documents, each
// choice cuts the packs, in the order of their tokens, into runs, one for each number of tokens
// that a capacity has: no choice pads less than the best cut does. A capacity that has as many
// documents as any pack of no more tokens attains it, since each pack then goes where its tokens
// alone would send it. Each such capacity holds whatever smaller ones hold, so that a pack of
// unusually many documents still finds one. That makes the cut a problem of one dimension, which is
// solved exactly, run by run.
//
// Documents get the captures that are left once each number of tokens has its own. A run of several
// numbers of tokens that takes two captures always loses to two runs. So only a run of one number
// is cut by documents, again exactly.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "csrc/decide/dispatch.h"

namespace megagraph {

struct Choice {
  std::vector<Capacity> capacities;  // smallest first
  int64_t padded_tokens;             // over all packs
};

// What every choice holds beside the packs: those to come may be larger.
struct Room {
  int64_t tokens, num_seqs;
};

// The best choice of at most 1, 2, ... `captures` capacities for packs, of which each came so many
// times. Their tokens are multiples of `multiple`, their longest document is as long as they are.
std::vector<Choice> best_capacities(const std::map<PackShape, int64_t>& packs, Room room,
                                    int64_t multiple, int captures);

}  // namespace megagraph
